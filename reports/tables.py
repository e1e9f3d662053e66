"""Tables for papers and pull requests: Markdown and LaTeX."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from spikemark.harness.records import OK
from spikemark.reports import answers, environments, table_data, words
from spikemark.reports.answers import Answer
from spikemark.reports.rows import Report, Row
from spikemark.reports.warnings import warnings

MOST_CASES = 200
"""Cases that a Markdown report lists; beyond it nobody reads a table without filters."""


def markdown_cell(text: str) -> str:
    """``text`` inert in a Markdown table: no markup, no column break, no HTML."""
    text = words.clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*\[\]~$@#])", r"\\\1", text)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """A GitHub-flavoured table; columns in ``numeric`` are aligned to the right."""
    marks = ["---:" if i in numeric else "---" for i in range(len(header))]
    lines = [list(header), marks, *([markdown_cell(c) for c in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown(report: Report) -> str:
    """The report as Markdown: warnings, winners, cases, failures, environments."""
    found = answers.answers(report)
    parts = ["# Spikemark report\n"]
    notes = [f"- {markdown_cell(f'{w.text} {w.who}'.strip())}\n" for w in warnings(report)]
    if notes:
        parts.append("## Before you read\n\n" + "".join(notes))
    parts.append("## What to use\n\n" + _markdown_winners(report, found))
    ok = [r for r in report.rows if answers.timed(r)]
    if ok and len(report.rows) <= MOST_CASES:
        parts.append("## Every case\n\n" + _markdown_cases(report))
    elif ok:
        text = (
            f"{len(report.rows):,} cases are too many for a Markdown table: `spikemark report --format csv` has them."
        )
        parts.append(f"## Every case\n\n{text}\n")
    failed = [r for r in report.rows if r["status"] != OK]
    if failed:
        parts.append("## What failed, and why\n\n" + _markdown_failures(failed))
    lines = [
        f"- {markdown_cell(environments.title(report, key))}: {markdown_cell(environments.describe(env))}\n"
        for key, env in environments.named(report).items()
    ]
    parts.append("## Where it was measured\n\n" + ("".join(lines) or "Not recorded.\n"))
    return "\n".join(parts)


def _place(report: Report, row: Row) -> str:
    return environments.title(report, row["environment"])


def _size(row: Row) -> str:
    return f"batch {row['batch']}, T {row['time_steps']}, {words.rate(row['rate_asked'])}"


def _markdown_winners(report: Report, found: list[Answer]) -> str:
    rows = []
    for answer in found:
        best = answer.winner
        if best is None:
            continue
        gain = (best["speedup"], best["speedup_low"], best["speedup_high"])
        over = "baseline" if best["baseline"] else _with(words.factor(*gain), words.factor_interval(*gain))
        cells = [best["operator"], best["phase"], best["workload"], _size(best), _place(report, best)]
        cells += [" = ".join(answer.names), over, _time(best), words.size(best["peak_bytes"]), answer.surety]
        rows.append(cells)
    if not rows:
        return "No case has a time, so nothing can be recommended.\n"
    header = "operator,phase,workload,size,device,winner,over the baseline,time,peak memory,how sure".split(",")
    return markdown_table(header, rows, (6, 7, 8))


def _with(text: str, interval: str) -> str:
    return f"{text} ({interval})" if interval else text


def _gain(row: Row) -> str:
    if row["baseline"]:
        return "baseline" if row["speedup"] is not None else words.ABSENT
    return words.factor(row["speedup"], row["speedup_low"], row["speedup_high"])


def _time(row: Row) -> str:
    known = (row["median_s"], row["ci_low_s"], row["ci_high_s"])
    return _with(words.seconds(*known), words.seconds_interval(*known))


def _markdown_cases(report: Report) -> str:
    rows = []
    for r in report.rows:
        cells = [r["operator"], r["phase"], r["workload"], _size(r), _place(report, r), r["dtype"], r["implementation"]]
        cells += [r["status"], _time(r), _gain(r)]
        rows.append([*cells, words.size(r["peak_bytes"]), table_data.share(r)])
    header = (
        "operator,phase,workload,size,device,dtype,implementation,status,time,speed-up,peak memory,of copy bandwidth"
    )
    return markdown_table(header.split(","), rows, (8, 9, 10, 11))


def _markdown_failures(failed: list[Row]) -> str:
    counts: dict[tuple[str, ...], int] = {}
    for r in failed:
        key = (r["status"], r["operator"], r["implementation"], words.short(r["reason"], 300))
        counts[key] = counts.get(key, 0) + 1
    rows = [[*key, str(n)] for key, n in counts.items()]
    return markdown_table(["status", "operator", "implementation", "reason", "cases"], rows, (4,))


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "×": r"$\times$", "µ": r"\textmu{}", "–": "--",
    "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "·": r"$\cdot$", "…": r"\dots{}", '"': "''",
}  # fmt: skip


def latex_text(text: str) -> str:
    """``text`` with every character that TeX reads as a command made plain."""
    return "".join(_LATEX.get(char, char) for char in words.clean(text))


def latex(report: Report) -> str:
    """A ``tabular`` of all timed cases, a rule between comparisons, winners bold. Needs booktabs and textcomp."""
    found = [a for a in answers.answers(report) if a.winner]
    several = len({a.first["environment"] for a in found}) > 1
    header = ["operator", "phase", "workload", "batch", "$T$", *(["device"] if several else []), "implementation"]
    header += ["time", "95\\,\\% interval", "speed-up", "peak memory"]
    lines = ["% Made by spikemark report --format latex; needs \\usepackage{booktabs,textcomp}."]
    lines += [
        f"\\begin{{tabular}}{{{'l' * (len(header) - 4)}rrrr}}",
        r"\toprule",
        " & ".join(header) + r" \\",
        r"\midrule",
    ]
    blocks = [
        [_latex_row(report, answer, row, several) for row in answer.rows if answers.timed(row)] for answer in found
    ]
    for before, block in itertools.pairwise([[], *blocks]):
        lines += ([r"\midrule"] if before else []) + block
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_row(report: Report, answer: Answer, row: Row, several: bool) -> str:
    known = (row["median_s"], row["ci_low_s"], row["ci_high_s"])
    gain = _gain(row)
    cells = [row["operator"], row["phase"], words.short(row["workload"], 40), str(row["batch"]), str(row["time_steps"])]
    cells += [_place(report, row)] if several else []
    cells += [words.short(row["implementation"], 40), words.seconds(*known), words.seconds_interval(*known), gain]
    texts = [latex_text(c) for c in [*cells, words.size(row["peak_bytes"])]]
    if row is answer.winner or row in answer.tied:
        at = 6 if several else 5
        texts[at] = f"\\textbf{{{texts[at]}}}"
    return " & ".join(texts) + r" \\"
