"use strict";
// The table of cases: only rows that have every word of the search are shown.
(() => {
  const search = document.getElementById("search"), count = document.getElementById("count");
  const rows = [...document.querySelectorAll("#cases tbody tr")].map((row) => [row, row.textContent.toLowerCase()]);
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [row, text] of rows) {
      const fits = words.every((word) => text.includes(word));
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} cases`;
  };
  search.addEventListener("input", show);
  show();
})();
