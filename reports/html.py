"""The page: one self-contained HTML file that works from ``file://`` under a strict content-security policy."""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from markupsafe import Markup
from spikemark.harness.records import OK
from spikemark.harness.statistics import RUN_MARGIN
from spikemark.reports import answers, environments, saving, table_data, traces, words
from spikemark.reports.answers import Answer, Section
from spikemark.reports.rows import Report, Row, read
from spikemark.reports.warnings import warnings

ASSETS = Path(__file__).parent / "assets"
OPEN_ANSWERS = 40
"""Up to this many comparisons stand in one table; above, each operator and phase has its own, to be opened."""
MOST_ANSWERS = 40
"""Comparisons listed in one section of the first screen; the table has all."""
MOST_TIED = 3
MOST_FAILURES = 200
LEVEL_WORDS = {"bad": "Do not trust:", "care": "Mind:", "note": "Note:"}
STATUS_CLASS = {OK: "good", "unavailable": "", "unsupported": "", "out-of-memory": "care", "timed-out": "care"}
SURE_CLASS = {answers.CLEAR: "good", answers.UNCHECKED: "good", answers.DISTURBED: "bad"}
SURE_CLASS |= dict.fromkeys((answers.TIE, answers.NOISE, answers.ONE_PASS), "care")


def write(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of one or several run folders; ``out`` defaults to ``report.html`` in the first folder.

    Returns the file. Raises ``UsageError`` for a folder that is no run and ``StorageError`` where it cannot be written.
    """
    with keeping():
        report = read(list(runs))
        path = report.folder / "report.html" if out is None else Path(out)
        saving.save(path, page(report, folder=path.parent))
    return path


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """While a report is made everything read is kept: looking for garbage would cost a quarter of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def page(report: Report, devices: tuple[str, str] | None = None, folder: Path | None = None) -> str:
    """The whole page as text. ``devices`` names the two devices whose times are divided.

    ``folder`` is where the page will lie (default: the first run's folder); links to trace files are relative to it.
    """
    from spikemark import __version__
    from spikemark.reports import figures
    from spikemark.reports.figures import heat
    from spikemark.reports.figures.canvas import StyleSheet

    found = answers.answers(report)
    traced = traces.collect(report, folder)
    several = len({r["environment"] for r in report.rows}) > 1
    sections = answers.sections(report, found, lambda key: environments.title(report, key) if several else "")
    sections = [s for s in sections if any(a.winner for a in s.answers)]
    drawn, left = figures.choose(figures.pictures(report, found, devices))
    styles = figures.looks(r["implementation"] for r in report.rows)
    keys = {name: f"k{i}" for i, name in enumerate(styles)}
    sheet = StyleSheet()
    groups = picture_groups(drawn, sheet)
    css = (ASSETS / "report.css").read_text(encoding="utf-8") + sheet.css()
    css += traces.CSS if traced.entries or traced.damaged else ""
    css += "".join(f".{keys[name]}{{background:{look.color}}}" for name, look in styles.items())
    script = (ASSETS / "report.js").read_text(encoding="utf-8")
    columns = table_data.columns(report)
    data = {
        "columns": columns,
        "total": len(report.rows),
        "chunk": table_data.CHUNK,
        "keys": {words.clean(name): cls for name, cls in keys.items()},
        "status": {s: STATUS_CLASS.get(s, "bad") for s in {r["status"] for r in report.rows}},
        "environments": [_environment_line(report, key, env) for key, env in environments.named(report).items()],
    }
    opened = sum(len(s.answers) for s in sections) <= OPEN_ANSWERS
    template = templates().get_template("report.html.j2")
    return template.render(
        policy=policy(css, script),
        css=Markup(css),
        script=Markup(script),
        data=Markup(table_data.dumps(data)),
        chunks=[Markup(chunk) for chunk in table_data.chunks(report)],
        title=_title(report),
        facts=_facts(report),
        version=__version__,
        warnings=warnings(report),
        level_words=LEVEL_WORDS,
        query_link=query_link,
        how_sure=_how_sure(report),
        sections=[_section(s, keys) for s in sections],
        together=opened,
        nothing=_nothing(report),
        picture_groups=groups,
        left_out=words.count(len(left), "more picture") if left else "",
        refused=heat.refused_pairs(report),
        common=[(title, words.short(value, 60)) for title, value in table_data.common(columns)],
        traces=traced,
        failed=_failures(report)[:MOST_FAILURES],
        failed_more=_more(len(_failures(report)) - MOST_FAILURES, "kind of failure", "kinds of failure"),
        runs=[_run(report, i) for i in range(len(report.parts))],
        environments=_environments(report),
        differing_titles=[words.clean(t) for t in environments.differing(report)[0]],
        differing=_differing(report),
    )


def templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )


def policy(css: str, script: str) -> str:
    """Nothing may be loaded or sent; only this page's own style and script, by their hashes."""

    def sha(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    return f"default-src 'none'; style-src {sha(css)}; script-src {sha(script)}; base-uri 'none'; form-action 'none'"


def query_link(query: dict[str, Any]) -> str:
    """The address within the page that filters the table."""
    return "#cases?" + urlencode({k: words.clean(v) for k, v in query.items()}, quote_via=quote)


def _title(report: Report) -> str:
    if report.several:
        return f"Spikemark: {words.listed([words.short(name, 40) for name in report.labels], 3)}"
    preset = report.parts[0]["preset"]
    return f"Spikemark: {words.short(preset, 40)} run" if preset else "Spikemark report"


def _facts(report: Report) -> list[str]:
    found = environments.named(report)
    lines = list(dict.fromkeys(words.short(environments.describe(e), 120) for e in found.values()))
    facts = [words.count(len(report.rows), "case"), f"{len(report.ok):,} timed"]
    starts = sorted(str(part["started"])[:16].replace("T", " ") for part in report.parts if part["started"])
    if starts:
        facts.append(words.clean(starts[0] + (f" to {starts[-1]}" if len(set(starts)) > 1 else "")) + " UTC")
    return lines[:3] + ([f"and {len(lines) - 3} more environments"] if len(lines) > 3 else []) + facts


def _how_sure(report: Report) -> str:
    noises = [answers.smallest_difference(part) for part in report.parts]
    known = [n for n in noises if n is not None]
    text = "The fastest implementation that gave right results. A tie is named as such: the slower one’s time is not, "
    text += f"with its whole interval, more than {words.rate(RUN_MARGIN)} above the fastest."
    if not known:
        return text + " Without a self-test, leads are not checked against this machine’s own noise."
    return text + f" Smallest slowdown that this machine’s self-test finds reliably: {words.rate(max(known))}."


def _nothing(report: Report) -> str:
    if not report.rows:
        return "This run holds no case. Its journal is empty: it was stopped before the first case, or nothing matched."
    return "No case has a time, so nothing can be recommended. The reasons are listed under “What failed, and why”."


def _more(n: int, one: str, many: str | None = None) -> str:
    return f"{words.count(n, 'more ' + one, 'more ' + (many or one + 's'))} in the table of cases." if n > 0 else ""


def _section(section: Section, keys: dict[str, str]) -> dict[str, Any]:
    rows = [row for a in section.answers for row in a.rows]
    names = answers.varying(rows)
    # Comparisons with something to choose come first; those without a time are found under the failures.
    ranked = [a for a in section.answers if a.winner]
    lost = len(section.answers) - len(ranked)
    more = [_more(len(ranked) - MOST_ANSWERS, "comparison")]
    if lost:
        more.append(f"{words.count(lost, 'comparison')} without any time: see the failures.")
    return {
        "operator": words.short(section.operator, 60),
        "phase": words.short(section.phase, 40),
        "title": words.short(section.title, 60),
        "summary": words.short(section.summary, 240),
        "rows": [_answer(a, names, keys) for a in ranked[:MOST_ANSWERS]],
        "more": " ".join(m for m in more if m),
    }


def _answer(answer: Answer, names: list[str], keys: dict[str, str]) -> dict[str, Any]:
    row = answer.winner or answer.first
    query = {name: row[name] for name in ("operator", "phase", "workload", "device", "dtype", "batch", "time_steps")}
    query["rate_asked"] = words.rate(row["rate_asked"])
    peak, base = words.number(row["peak_bytes"]), answer.baseline and words.number(answer.baseline["peak_bytes"])
    ratio = (
        f"{words.factor(peak / base)} the baseline’s"
        if peak is not None and base and row is not answer.baseline
        else ""
    )
    gain = (row["speedup"], row["speedup_low"], row["speedup_high"])
    time = (row["median_s"], row["ci_low_s"], row["ci_high_s"])
    return {
        "workload": words.short(row["workload"], 60),
        "size": answers.size_words(row, names),
        "link": query_link(query),
        "names": [{"text": words.short(n, 40), "cls": keys[n]} for n in answer.names[:MOST_TIED]],
        "more_names": max(len(answer.names) - MOST_TIED, 0),
        "speedup": "is the baseline" if row["baseline"] else words.factor(*gain),
        "speedup_interval": "" if row["baseline"] else words.factor_interval(*gain),
        "time": words.seconds(*time),
        "time_interval": words.seconds_interval(*time),
        "peak": words.size(peak),
        "peak_ratio": ratio,
        "sure": answer.surety,
        "sure_class": SURE_CLASS.get(answer.surety, ""),
        "why": _why(answer),
    }


def _why(answer: Answer) -> str:
    failed = sum(1 for r in answer.rows if r["status"] != OK)
    text = ""
    if answer.lead is not None and not answer.tied:
        second = sorted((r for r in answer.rows if answers.timed(r)), key=lambda r: r["median_s"])[1]
        lead = words.factor(*answers.time_ratio(second, answer.winner or second))
        text = f"{lead} ahead of {words.short(second['implementation'], 28)}"
    if failed:
        text += (", " if text else "") + f"{failed} failed"
    return text


def picture_groups(drawn: list[Any], sheet: Any) -> list[dict[str, Any]]:
    from spikemark.reports.figures.canvas import WIDTH

    groups: dict[str, list[dict[str, Any]]] = {}
    for index, picture in enumerate(drawn):
        shown = {
            name: getattr(picture, name) for name in ("title", "alt", "note", "left_out", "header", "table", "numeric")
        }
        canvas = picture.draw()
        shown |= {"svg": Markup(canvas.svg(sheet, f"p{index}")), "wide": canvas.width > 1.2 * WIDTH}
        groups.setdefault(picture.section, []).append(shown)
    return [{"title": words.short(title, 90), "pictures": pictures} for title, pictures in groups.items()]


def _failures(report: Report) -> list[dict[str, Any]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in report.rows:
        if row["status"] != OK:
            key = (row["status"], row["operator"], row["implementation"], row["reason"])
            groups.setdefault(key, []).append(row)
    out = []
    for (status, operator, implementation, reason), rows in groups.items():
        query = {"operator": operator, "implementation": implementation, "status": status}
        shown = {
            "status": status,
            "cls": STATUS_CLASS.get(status, "bad"),
            "count": f"{len(rows):,}",
            "link": query_link(query),
        }
        shown |= {"operator": words.short(operator, 60), "implementation": words.short(implementation, 60)}
        out.append(shown | {"reason": words.short(reason, 600)})
    return sorted(out, key=lambda f: {"bad": 0, "care": 1}.get(f["cls"], 2))


def _run(report: Report, index: int) -> dict[str, str]:
    meta = report.parts[index]
    return {
        "label": words.short(report.labels[index], 60),
        "started": words.clean(str(meta["started"] or "–")[:19].replace("T", " ")),
        "cases": f"{sum(index in r['parts'] for r in report.rows):,}",
        "passes": str(meta["passes"]),
        "seed": str(meta["seed"]),
        "version": words.short(meta["spikemark"], 20),
        "command": words.short("spikemark " + shlex.join(str(a) for a in meta["arguments"]), 400),
    }


def _environment_line(report: Report, key: str, env: dict[str, Any]) -> str:
    return words.clean(f"{environments.title(report, key)}: {environments.describe(env)}")


def _environments(report: Report) -> list[dict[str, Any]]:
    out = []
    for key, env in environments.named(report).items():
        fields = [
            (words.clean(k), words.short(environments.value_text(v), 400)) for k, v in environments.flatten(env).items()
        ]
        title = words.short(environments.title(report, key), 60)
        out.append({"title": title, "line": words.short(environments.describe(env), 160), "fields": fields})
    return out


def _differing(report: Report) -> list[tuple[str, list[str]]]:
    rows = environments.differing(report)[1]
    return [(words.clean(name), [words.short(v, 200) for v in values]) for name, values in rows]
