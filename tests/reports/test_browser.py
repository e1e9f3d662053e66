"""The page in headless Chromium, from ``file://``: it obeys its policy, runs no name as script, and the table works."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic
from spikemark.reports import html

pytestmark = pytest.mark.browser
KEYS = {"tab": "\ue004", "enter": "\ue007"}


class View:
    """A page opened in the browser."""

    def __init__(self, session: Any, path: Path) -> None:
        self.session, self.path = session, path

    def open(self, fragment: str = "", width: int = 1280, dark: bool = False) -> View:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.session.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.session.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.session.get("about:blank")
        self.session.get_log("browser")
        self.session.get(self.path.as_uri() + fragment)
        return self

    def js(self, code: str, *arguments: Any) -> Any:
        return self.session.execute_script(code, *arguments)

    def until(self, code: str) -> Any:
        """What ``code`` returns once it is truthy; fails after five seconds."""
        for _ in range(250):
            if found := self.js(code):
                return found
            time.sleep(0.02)
        raise AssertionError(f"never true: {code}")

    def count(self) -> int:
        return int(self.js("return document.getElementById('count').textContent").split(" ")[0].replace(",", ""))

    def cells(self, column: str) -> list[str]:
        code = """const i = [...document.querySelectorAll('#head th')].findIndex(th => th.dataset.id === arguments[0]);
        const rows = [...document.querySelectorAll('#body tr.row')];
        return rows.map(tr => tr.children[i].querySelector('bdi').textContent);"""
        found: list[str] = self.js(code, column)
        return found

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.session).send_keys(*keys).perform()

    def copied(self, button: str) -> str:
        """What a copy button hands to the clipboard."""
        self.js(
            """window.kept = null;
            Object.defineProperty(navigator, 'clipboard', {configurable: true,
              value: {writeText: async (t) => { window.kept = t; }}});
            document.getElementById(arguments[0]).click();""",
            button,
        )
        return str(self.until("return window.kept"))


@pytest.fixture(scope="module")
def everyday_file(everyday: Path) -> Path:
    return html.write([everyday])


@pytest.fixture
def view(browser: Any, everyday_file: Path) -> View:
    return View(browser, everyday_file).open()


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_hostile_names_run_nothing_and_load_nothing(browser: Any, hostile: Path, width: int, dark: bool) -> None:
    view = View(browser, html.write([hostile])).open(width=width, dark=dark)
    view.js("document.querySelectorAll('#body .opener').forEach(b => b.click())")
    view.until("return document.querySelectorAll('tr.detail .command').length === 24")
    assert view.js("return typeof window.pwned") == "undefined"
    assert view.js("return document.querySelectorAll('img, iframe, object, embed').length") == 0
    assert view.js("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert browser.get_log("browser") == []
    assert synthetic.HOSTILE[0] in view.js("return document.body.innerText")
    assert view.js("return getComputedStyle(document.body).direction") == "ltr"


def test_the_policy_is_obeyed_where_it_is_broken(view: View) -> None:
    """The policy is alive: an injected script and style do nothing but complain."""
    view.js(
        """const s = document.createElement('script'); s.textContent = 'window.pwned = 1'; document.body.append(s);
        document.body.setAttribute('style', 'color: rgb(1, 2, 3)');"""
    )
    assert view.js("return typeof window.pwned") == "undefined"
    assert view.js("return getComputedStyle(document.body).color") != "rgb(1, 2, 3)"
    assert len(view.session.get_log("browser")) >= 2


@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_and_the_page_is_silent(browser: Any, everyday_file: Path, width: int, dark: bool) -> None:
    view = View(browser, everyday_file).open(width=width, dark=dark)
    assert view.js("return document.documentElement.scrollWidth") <= width
    outside = """const w = document.documentElement.clientWidth;
    return [...document.querySelectorAll('h1, h2, h3, p, figure, svg, .scroll, details, nav, form, button, select')]
      .filter(e => e.getClientRects().length && !e.parentElement.closest('.scroll, .wide, svg'))
      .map(e => [e.tagName, e.className.baseVal ?? e.className, e.getBoundingClientRect()])
      .filter(([, , r]) => r.left < 0 || r.right > w + 0.5).map(([t, c]) => t + '.' + c);"""
    assert view.js(outside) == []
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("dark", [False, True])
def test_texts_have_the_contrast_that_wcag_aa_asks_for(browser: Any, everyday_file: Path, dark: bool) -> None:
    view = View(browser, everyday_file).open(dark=dark)
    code = """
    const parse = (c) => c.match(/[\\d.]+/g).map(Number);
    const lum = (c) => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255;
      return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
      return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const under = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
    const bad = [];
    let seen = 0;
    for (const e of document.querySelectorAll('body *')) {
      const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
      if (!own || !e.getClientRects().length || e.closest('script, style, #body tr:nth-child(n+8)')) continue;
      seen++;
      const svg = e.namespaceURI.includes('svg'), style = getComputedStyle(e);
      const fill = parse(svg ? style.fill : style.color);
      if (svg && fill.every((v, i) => i > 2 || v === fill[0]) && [0, 255].includes(fill[0])) continue; // on a heat cell
      const [a, b] = [lum(fill), lum(under(svg ? e.closest('div') : e))].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      if (ratio < 4.5) bad.push([e.tagName, e.className.baseVal ?? e.className, e.textContent.slice(0, 30), ratio]);
    }
    return [seen, bad];"""
    seen, bad = view.js(code)
    assert seen > 500 and bad == []
    grey = 80 if dark else 150
    view.js(f"document.styleSheets[0].insertRule('h2, .note {{ color: rgb({grey}, {grey}, {grey}) !important }}', 0)")
    assert {b[0] for b in view.js(code)[1]} >= {"H2", "P"}


def test_filters_by_mouse(view: View) -> None:
    from selenium.webdriver.support.ui import Select

    assert view.count() == 295
    Select(view.session.find_element("css selector", "select[data-id=operator]")).select_by_visible_text("srm_neuron")
    Select(view.session.find_element("css selector", "select[data-id=batch]")).select_by_visible_text("8")
    assert view.count() == 71 and set(view.cells("operator")) == {"srm_neuron"} and set(view.cells("batch")) == {"8"}
    view.session.find_element("id", "clear").click()
    assert view.count() == 295


def test_search_and_sort_by_keyboard(view: View) -> None:
    view.js("document.getElementById('search').focus()")
    view.press("native cifar10-vgg")
    assert view.count() == 16
    view.js("document.querySelector('#head th[data-id=median_s] button').focus()")
    view.press(KEYS["enter"])
    times = view.js("return [...document.querySelectorAll('#head th')].map(t => t.getAttribute('aria-sort'))")
    assert times.count("ascending") == 1
    nums = """const c = JSON.parse(document.getElementById('data').textContent).columns.find(c => c.id === 'median_s');
    return [...document.querySelectorAll('#body tr.row')].map(t => c.nums[t.dataset.i])"""
    up = view.js(nums)
    assert up == sorted(up) and len(set(up)) > 8
    view.press(KEYS["enter"])
    assert view.js(nums) == sorted(up, reverse=True)


def test_rows_without_a_number_stand_last_either_way(view: View) -> None:
    for fragment in ("#cases?sort=median_s&workload=cifar100-vgg%2Fconv7", "#cases?sort=-median_s"):
        view.open(fragment)
        view.until("return document.querySelectorAll('#body tr.row').length")
    view.js("while (!document.getElementById('more').hidden) document.getElementById('more').click()")
    assert view.cells("median_s")[-7:] == ["–"] * 7 and "–" not in view.cells("median_s")[:-7]


def test_a_link_brings_the_same_rows_back(view: View) -> None:
    view.js("document.getElementById('search').focus()")
    view.press("backward")
    view.js("document.querySelector('#head th[data-id=speedup] button').click()")
    view.js("document.querySelector('#head th[data-id=speedup] button').click()")
    before, link = view.cells("implementation"), view.copied("copy-link")
    assert link == view.js("return location.href") and "sort=-speedup" in link
    view.open("#" + link.split("#", 1)[1])
    assert (
        view.cells("implementation") == before
        and view.js("return document.getElementById('search').value") == "backward"
    )
    assert view.js("return document.getElementById('cases').getBoundingClientRect().top") < 300


@pytest.mark.parametrize(
    "fragment", ["#cases?sort=constructor&__proto__=x&toString=1", "#cases?q=%22%3E%3Cscript%3E", "#x"]
)
def test_a_wrong_link_does_no_harm(view: View, fragment: str) -> None:
    view.open(fragment)
    assert view.count() in (0, 295) and view.session.get_log("browser") == []


def test_a_row_opens_to_samples_ledger_environment_and_command(view: View) -> None:
    view.open("#cases?implementation=native&device=cpu%3A1")
    view.js("document.querySelector('#body .opener').focus()")
    view.press(KEYS["enter"])
    text = view.until("const d = document.querySelector('tr.detail .boxes'); return d && d.closest('td').innerText")
    for wanted in (
        "Memory ledger",
        "Verification",
        "Environment",
        "Samples",
        "spikemark run --operator srm_neuron",
        "saved",
    ):
        assert wanted in text
    assert view.js("return document.querySelectorAll('tr.detail circle').length") == 2 * (12 + 4 + 4)
    assert view.js("return document.querySelector('#body .opener').getAttribute('aria-expanded')") == "true"
    view.press(KEYS["enter"])
    assert view.js("return document.querySelectorAll('tr.detail').length") == 0


def test_copying_gives_the_filtered_rows(view: View) -> None:
    view.open("#cases?status=ok&implementation=aten")
    rows = list(csv.DictReader(io.StringIO(view.copied("copy-csv"))))
    assert len(rows) == view.count() == 32
    assert {r["implementation"] for r in rows} == {"aten"} and all(
        float(r["ci_low_s"]) <= float(r["median_s"]) for r in rows
    )
    lines = view.copied("copy-markdown").splitlines()
    assert len(lines) == 34 and len({line.count("|") for line in lines}) == 1


def test_every_row_is_reached_by_scrolling(view: View) -> None:
    view.until(
        """const f = document.getElementById('frame'); f.scrollTop = f.scrollHeight;
        return document.querySelectorAll('#body tr.row').length === 295;"""
    )


def test_the_header_stays_in_sight(view: View) -> None:
    view.js("const f = document.getElementById('frame'); f.scrollIntoView(); f.scrollTop = 900;")
    gap = """const [th, frame] = ['#head th', '#frame'].map(s => document.querySelector(s).getBoundingClientRect().top);
    return th - frame;"""
    assert 0 <= view.js(gap) <= 2


def test_it_prints_on_a4(view: View) -> None:
    pdf = view.session.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"]
    assert len(pdf) > 50_000


@pytest.mark.parametrize(
    "make",
    [
        lambda p: synthetic.write(p, [], calibrations=False),
        lambda p: synthetic.write(p, [synthetic.failure(next(synthetic.cases()), 0, "crashed")]),
    ],
)
def test_runs_without_times_open_too(browser: Any, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    view = View(browser, html.write([make(tmp_path / "r")])).open()
    assert view.count() in (0, 1) and browser.get_log("browser") == []


def test_a_phone_shows_answers_first_and_every_cell_without_scrolling_sideways(
    browser: Any, everyday_file: Path
) -> None:
    view = View(browser, everyday_file).open(width=390)
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    assert view.js(top, "#answers h2") < 300 < view.js(top, "#warnings")
    assert view.js("return getComputedStyle(document.querySelector('.alerts')).display") == "flex"
    outside = """const frame = document.getElementById('frame').getBoundingClientRect();
    const cells = [...document.querySelectorAll('#body td')].filter(td => td.getClientRects().length);
    return [cells.length, cells.filter(td => td.getBoundingClientRect().right > frame.right).length];"""
    shown, cut = view.js(outside)
    assert shown > 200 and cut == 0
    assert view.js("return document.querySelectorAll('.wide').length") > 0
    sizes = """return [...document.querySelectorAll('.picture svg')].flatMap(svg => [...svg.querySelectorAll('text')]
      .map(t => parseFloat(getComputedStyle(t).fontSize) * svg.clientWidth / svg.viewBox.baseVal.width));"""
    assert min(view.js(sizes)) >= 6.5  # the smallest: "pass 1"; names and numbers are larger
    assert sorted(view.js(sizes))[len(view.js(sizes)) // 10] >= 8


def test_columns_of_one_value_are_said_once(browser: Any, tmp_path: Path) -> None:
    one = [synthetic.record(c, 0) for c in synthetic.cases(workloads={"a": ((8, 8, 8), 5)}, batches=(4,))]
    view = View(browser, html.write([synthetic.write(tmp_path / "r", one, passes=1)])).open()
    heads = view.js("return [...document.querySelectorAll('#head th')].map(th => th.dataset.id)")
    assert not {"device", "dtype", "batch", "time_steps", "rate_asked"} & set(heads) and "status" in heads
    said = view.js("return document.querySelector('#cases .note').textContent")
    assert said == "The same in every case: device cpu, dtype float32, batch 4, T 5, rate 10 %, findings one-pass."
    rows = list(csv.DictReader(io.StringIO(view.copied("copy-csv"))))
    assert {r["batch"] for r in rows} == {"4"} and len(rows) == len(one)


def test_nothing_is_cut_on_an_a4_page(browser: Any, everyday_file: Path) -> None:
    """182 mm between margins of 14 mm are 688 pixels."""
    view = View(browser, everyday_file).open(width=688)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert view.js("return getComputedStyle(document.getElementById('filters')).display") == "none"
        wide = """const w = document.documentElement.clientWidth;
        return [...document.querySelectorAll('table, figure, svg, pre, p')].filter(e => e.getClientRects().length)
          .map(e => [e.tagName, e.id || e.className.baseVal || e.className, e.getBoundingClientRect().right])
          .filter(([, , right]) => right > w + 1);"""
        assert view.js("return document.querySelectorAll('table.winners').length") > 0
        view.js("document.querySelectorAll('details.answer').forEach(d => d.open = true)")
        assert view.js(wide) == []
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
