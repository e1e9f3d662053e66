"use strict";
// The table of cases: filter, sort, open, copy. All text goes through textContent: no name can become markup.
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const columns = data.columns, total = data.total;
  const FIRST = 30, STEP = 100; // a screenful at once, so that a filter answers in a blink; the rest while scrolling
  const column = Object.assign(Object.create(null), Object.fromEntries(columns.map((c) => [c.id, c])));
  const shown = columns.filter((c) => c.shown);
  const state = { q: "", sort: "", down: false, filters: {} };
  let order = [], drawn = 0, haystack = null;

  const make = (tag, attributes, ...children) => {
    const node = document.createElement(tag);
    for (const [k, v] of Object.entries(attributes || {})) node.setAttribute(k, v);
    node.append(...children);
    return node;
  };
  const name = (text) => make("bdi", {}, text);
  const value = (c, i) => (c.codes ? c.values[c.codes[i]] : c.text ? c.text[i] : c.nums[i]);

  // ---- state in the address: a link to a filter is the page's address
  function readHash() {
    state.q = ""; state.sort = ""; state.down = false; state.filters = {};
    if (!location.hash.startsWith("#cases?")) return false;
    for (const [k, v] of new URLSearchParams(location.hash.slice(7))) {
      if (k === "q") state.q = v;
      else if (k === "sort") { state.down = v.startsWith("-"); state.sort = v.replace(/^-/, ""); }
      else if (column[k] && column[k].filter) state.filters[k] = v;
    }
    if (!column[state.sort]) state.sort = "";
    return true;
  }
  function hash() {
    const out = new URLSearchParams();
    for (const [k, v] of Object.entries(state.filters)) out.set(k, v);
    if (state.q) out.set("q", state.q);
    if (state.sort) out.set("sort", (state.down ? "-" : "") + state.sort);
    const text = out.toString();
    return "#cases" + (text ? "?" + text : "");
  }
  function writeHash() {
    // replaceState keeps the Back key for pages, not for every key pressed.
    try { history.replaceState(null, "", hash()); } catch { location.hash = hash(); }
  }

  // ---- which rows, in which order
  function searched() {
    if (!haystack) {
      const names = columns.filter((c) => c.codes);
      const low = names.map((c) => c.values.map((v) => v.toLowerCase()));
      haystack = Array.from({ length: total }, (_, i) => names.map((c, n) => low[n][c.codes[i]]).join(" "));
    }
    return haystack;
  }
  function matches() {
    const tests = [];
    for (const [id, wanted] of Object.entries(state.filters)) {
      const c = column[id];
      const allowed = c.values.map((v) => v === wanted || (id === "flags" && v.split(", ").includes(wanted)));
      tests.push((i) => allowed[c.codes[i]]);
    }
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) {
      const text = searched();
      tests.push((i) => words.every((w) => text[i].includes(w)));
    }
    const out = [];
    for (let i = 0; i < total; i++) if (tests.every((t) => t(i))) out.push(i);
    return out;
  }
  function sorted(rows) {
    const c = column[state.sort];
    if (!c) return rows;
    let key;
    if (c.nums) key = c.nums;
    else {
      const rank = c.values.map((_, k) => k);
      rank.sort((a, b) => (c.order ? (c.order[a] ?? 0) - (c.order[b] ?? 0) : c.values[a] < c.values[b] ? -1 : 1));
      const place = []; rank.forEach((k, p) => { place[k] = p; });
      key = c.codes.map((k) => place[k]);
    }
    const sign = state.down ? -1 : 1;
    return rows.sort((a, b) => {
      const x = key[a], y = key[b];
      if (x === null || y === null) return x === y ? a - b : x === null ? 1 : -1; // what has no number stands last, either way
      return sign * (x - y) || a - b;
    });
  }

  // ---- drawing
  function cell(c, i) {
    const td = make("td", { "data-label": c.title, "data-id": c.id, ...(c.codes ? {} : { class: "n" }) });
    if (c.id === "status") td.append(make("span", { class: "status " + data.status[value(c, i)] }, value(c, i)));
    else if (c.id === "implementation") td.append(make("span", { class: "key " + data.keys[value(c, i)] }), name(value(c, i)));
    else td.append(name(String(value(c, i))));
    if (c.small && c.small[i]) td.append(make("small", {}, c.small[i]));
    return td;
  }
  function row(i) {
    const tr = make("tr", { class: "row" });
    tr.dataset.i = i;
    shown.forEach((c, n) => {
      const td = cell(c, i);
      if (n === 0) {
        const button = make("button", { type: "button", class: "opener", "aria-expanded": "false", "aria-label": "Details of row " + (i + 1) }, "▸");
        td.prepend(button);
      }
      tr.append(td);
    });
    return tr;
  }
  function grow(count) {
    const part = document.createDocumentFragment();
    const end = Math.min(drawn + count, order.length);
    for (; drawn < end; drawn++) part.append(row(order[drawn]));
    byId("body").append(part);
    byId("more").hidden = drawn >= order.length;
    byId("more").textContent = `Show more rows (${(order.length - drawn).toLocaleString("en")} left)`;
  }
  function update() {
    order = sorted(matches());
    byId("body").replaceChildren();
    drawn = 0;
    grow(FIRST);
    byId("frame").scrollTop = 0;
    byId("count").textContent = `${order.length.toLocaleString("en")} of ${total.toLocaleString("en")} cases`;
    for (const th of byId("head").children) {
      const here = th.dataset.id === state.sort;
      th.setAttribute("aria-sort", here ? (state.down ? "descending" : "ascending") : "none");
      th.firstChild.lastChild.textContent = here ? (state.down ? " ↓" : " ↑") : "";
    }
    byId("search").classList.toggle("on", !!state.q);
    for (const select of byId("selects").querySelectorAll("select")) {
      select.value = state.filters[select.dataset.id] ?? "";
      select.classList.toggle("on", select.dataset.id in state.filters);
    }
    if (document.activeElement !== byId("search")) byId("search").value = state.q;
    requestAnimationFrame(fill);
  }

  // ---- what a row opens to
  const unpacked = new Map();
  async function details(i) {
    const chunk = Math.floor(i / data.chunk);
    if (!unpacked.has(chunk)) {
      const bytes = Uint8Array.from(atob(byId("details-" + chunk).textContent), (ch) => ch.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      unpacked.set(chunk, new Response(stream).text().then(JSON.parse));
    }
    return (await unpacked.get(chunk))[i % data.chunk];
  }
  function strips(samples) {
    const box = make("div", { class: "strips" });
    const svg = (tag, attributes, text) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
      if (text !== undefined) node.textContent = text;
      return node;
    };
    const rows = Object.entries(samples.kinds).flatMap(([kind, passes]) => passes.map(([p, taken, v]) => [`${kind}, pass ${p + 1}`, v.map((n) => n / samples.per), taken]));
    const all = rows.flatMap((r) => r[1]);
    if (!all.length) return box;
    const low = Math.min(...all), high = Math.max(...all), span = high - low || 1, W = innerWidth < 640 ? 330 : 640, L = 110, R = 16, H = 18;
    const x = (v) => L + ((v - low) / span) * (W - L - R);
    const root = svg("svg", { viewBox: `0 0 ${W} ${rows.length * H + 26}`, role: "img", "aria-label": "Samples of every pass" });
    rows.forEach(([title, values], n) => {
      const y = n * H + H / 2 + 2;
      root.append(svg("text", { x: L - 8, y: y + 4, "text-anchor": "end" }, title), svg("line", { class: "axis", x1: L, x2: W - R, y1: y, y2: y }));
      for (const v of values) root.append(svg("circle", { class: "dot", cx: x(v), cy: y, r: 3.2 }));
      const s = [...values].sort((a, b) => a - b), m = s.length % 2 ? s[(s.length - 1) / 2] : (s[s.length / 2 - 1] + s[s.length / 2]) / 2;
      if (s.length) root.append(svg("line", { class: "mid", x1: x(m), x2: x(m), y1: y - 7, y2: y + 7 }));
    });
    const y = rows.length * H + 18;
    root.append(svg("text", { x: L, y }, `${+low.toPrecision(4)} ${samples.unit}`), svg("text", { x: W - R, y, "text-anchor": "end" }, `${+high.toPrecision(4)} ${samples.unit}`));
    const list = make("details", {}, make("summary", {}, `Samples in ${samples.unit}`));
    for (const [title, values, taken] of rows) {
      const thinned = values.length < taken ? ` (${values.length} of ${taken}, evenly by rank; all are in cases.jsonl)` : "";
      list.append(make("p", {}, make("b", {}, title + thinned + ": "), values.join(", ")));
    }
    box.append(root, list);
    return box;
  }
  async function open(tr) {
    const button = tr.querySelector(".opener"), next = tr.nextElementSibling;
    if (next && next.classList.contains("detail")) {
      next.remove(); button.setAttribute("aria-expanded", "false"); button.textContent = "▸";
      return;
    }
    button.setAttribute("aria-expanded", "true"); button.textContent = "▾";
    const inside = make("div", { class: "inside" });
    tr.after(make("tr", { class: "detail" }, make("td", { colspan: shown.length }, inside)));
    let found;
    try { found = await details(Number(tr.dataset.i)); } catch (error) {
      inside.append("This browser cannot unpack the details (" + error.message + "); the run folder's cases.jsonl holds them.");
      return;
    }
    if (found.reason) inside.append(make("p", {}, make("b", {}, "Reason: "), name(found.reason)));
    const code = make("code", {}, name(found.command)), copy = make("button", { type: "button" }, "Copy command");
    copy.addEventListener("click", () => put(found.command, "Command"));
    inside.append(make("div", { class: "command" }, code, copy));
    if (found.samples.kinds) inside.append(make("div", {}, make("h4", {}, "Samples"), strips(found.samples)));
    const boxes = make("div", { class: "boxes" });
    for (const [title, pairs] of found.facts) {
      const list = make("dl");
      for (const [k, v] of pairs) list.append(make("dt", {}, name(k)), make("dd", {}, name(v)));
      boxes.append(make("div", {}, make("h4", {}, title), list));
    }
    if (found.traces.length) {
      const links = found.traces.map(([title, href]) => make("p", {}, make("a", { href }, title)));
      boxes.append(make("div", {}, make("h4", {}, "Why: traces"), ...links));
    }
    const where = data.environments[found.environment];
    if (where) boxes.append(make("div", {}, make("h4", {}, "Environment"), name(where)));
    inside.append(boxes);
  }

  // ---- copying
  async function put(text, what) {
    let done = false;
    try { await navigator.clipboard.writeText(text); done = true; } catch { /* not allowed here: the older way */ }
    const area = byId("fallback");
    if (!done) {
      area.hidden = false; area.value = text; area.select();
      try { done = document.execCommand("copy"); } catch { done = false; }
      area.hidden = done;
    }
    byId("copied").textContent = done ? `${what} copied.` : "Copy the text below by hand.";
  }
  function table(kind) {
    const csv = (v) => (v === null ? "" : /[",\r\n]/.test(v) ? `"${String(v).replaceAll('"', '""')}"` : String(v));
    const md = (v) => String(v).replaceAll("\\", "\\\\").replaceAll("|", "\\|").replaceAll("<", "&lt;").replaceAll("\n", " ");
    if (kind === "csv") {
      const raw = (c, i) => (c.codes ? c.values[c.codes[i]] : c.nums[i]);
      return [columns.map((c) => c.id), ...order.map((i) => columns.map((c) => raw(c, i)))].map((r) => r.map(csv).join(",")).join("\n") + "\n";
    }
    const cellText = (c, i) => value(c, i) + (c.small && c.small[i] ? ` (${c.small[i]})` : "");
    const lines = [shown.map((c) => c.title), shown.map((c) => (c.codes ? "---" : "---:")), ...order.map((i) => shown.map((c) => md(cellText(c, i))))];
    return lines.map((r) => `| ${r.join(" | ")} |`).join("\n") + "\n";
  }

  // ---- set-up
  for (const c of shown) {
    const button = make("button", { type: "button", title: "Sort by " + c.title }, c.title, make("span"));
    button.addEventListener("click", () => {
      state.down = state.sort === c.id ? !state.down : false;
      state.sort = c.id;
      update(); writeHash();
    });
    const th = make("th", { scope: "col", "aria-sort": "none", ...(c.codes ? {} : { class: "n" }) }, button);
    th.dataset.id = c.id;
    byId("head").append(th);
  }
  for (const c of columns.filter((c) => c.filter)) {
    let options = c.id === "flags" ? [...new Set(c.values.flatMap((v) => v.split(", ")))].filter(Boolean) : [...c.values];
    if (options.length < (c.id === "flags" ? 1 : 2)) continue;
    if (c.order) options.sort((a, b) => c.order[c.values.indexOf(a)] - c.order[c.values.indexOf(b)]); else options.sort();
    const select = make("select", {}, make("option", { value: "" }, "all"));
    for (const v of options) select.append(make("option", { value: v }, v.length > 60 ? v.slice(0, 57) + "…" : v));
    select.dataset.id = c.id;
    select.addEventListener("change", () => {
      if (select.value) state.filters[c.id] = select.value; else delete state.filters[c.id];
      update(); writeHash();
    });
    byId("selects").append(make("label", {}, c.title, select));
  }
  byId("filters").addEventListener("submit", (e) => e.preventDefault());
  byId("search").addEventListener("input", () => { state.q = byId("search").value.trim(); update(); writeHash(); });
  byId("clear").addEventListener("click", () => { state.q = ""; state.sort = ""; state.filters = {}; byId("search").value = ""; update(); writeHash(); });
  byId("copy-link").addEventListener("click", () => put(location.href.split("#")[0] + hash(), "Link"));
  byId("copy-markdown").addEventListener("click", () => put(table("markdown"), "Table"));
  byId("copy-csv").addEventListener("click", () => put(table("csv"), "Table"));
  byId("more").addEventListener("click", () => grow(STEP));
  byId("body").addEventListener("click", (e) => {
    const tr = e.target.closest("tr.row");
    if (tr && !String(getSelection())) open(tr);
  });
  const frame = byId("frame");
  const nearEnd = () => frame.scrollTop + frame.clientHeight > frame.scrollHeight - 300;
  const fill = () => { if (drawn < order.length && nearEnd()) { grow(STEP); requestAnimationFrame(fill); } };
  frame.addEventListener("scroll", fill, { passive: true });
  addEventListener("resize", fill);
  const openTrace = () => { const at = byId(location.hash.slice(1)); if (at && at.tagName === "DETAILS") at.open = true; };
  addEventListener("hashchange", openTrace);
  openTrace();
  addEventListener("hashchange", () => { if (readHash()) { update(); byId("cases").scrollIntoView(); } });
  addEventListener("beforeprint", () => grow(Math.max(0, 1000 - drawn)));
  // Ready before the first key is pressed: of 10,000 rows this takes as long as a filter may.
  (window.requestIdleCallback || setTimeout)(searched);
  const linked = readHash();
  update();
  if (linked) byId("cases").scrollIntoView();
})();
