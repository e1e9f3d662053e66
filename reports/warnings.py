"""What changes how the numbers may be read: failures, noise, launches, impossible bandwidths, a disturbed machine."""

from __future__ import annotations

from dataclasses import dataclass

from spikemark.harness import records
from spikemark.harness.parts import Part, base_key
from spikemark.harness.statistics import NOISY
from spikemark.reports import answers, environments, words
from spikemark.reports.rows import Report, Row


@dataclass(frozen=True)
class Caution:
    """One thing to know. ``query`` filters the table to the rows concerned.

    ``level`` is ``bad`` (do not use this number), ``care`` (read it so) or ``note``; ``who`` names implementations.
    """

    level: str
    text: str
    query: dict[str, str]
    who: str = ""


STATUS_WORDS = {
    records.INCORRECT: ("bad", "gave a wrong result and was not timed", "gave wrong results and were not timed"),
    records.CRASHED: ("bad", "crashed its process", "crashed their process"),
    records.OUT_OF_MEMORY: ("care", "ran out of memory", "ran out of memory"),
    records.TIMED_OUT: ("care", "ran out of time", "ran out of time"),
    records.ERROR: ("bad", "raised an error", "raised an error"),
    records.UNSUPPORTED: ("note", "is not supported here", "are not supported here"),
    records.UNAVAILABLE: ("note", "is not available here", "are not available here"),
}
FLAG_WORDS = {
    "noisy": (
        "care",
        f"is noisy: its interval is wider than ±{NOISY:.0%}".replace("%", "\N{NO-BREAK SPACE}%"),
        f"are noisy: their intervals are wider than ±{NOISY:.0%}".replace("%", "\N{NO-BREAK SPACE}%"),
    ),
    "launch-bound": (
        "care",
        "is launch-bound: the call costs much more than the kernel",
        "are launch-bound: the call costs much more than the kernel",
    ),
    "above-copy-bandwidth": (
        "bad",
        "is faster than memory allows, in every pass: the cost model is wrong, or the work was not done",
        "are faster than memory allows, in every pass: the cost model is wrong, or the work was not done",
    ),
    "in-cache": (
        "note",
        "fits the last cache, so memory's bandwidth is no roofline for it",
        "fit the last cache, so memory's bandwidth is no roofline for them",
    ),
    "slower-than-baseline": ("note", "is slower than its baseline", "are slower than their baseline"),
    "shared-device": (
        "bad",
        "was measured while another run used the same device",
        "were measured while another run used the same device",
    ),
    "code-changed": ("bad", "has passes of different code", "have passes of different code"),
    "environment-changed": ("bad", "has passes in different environments", "have passes in different environments"),
    "keeps-memory": ("care", "keeps memory after its call", "keep memory after their call"),
    "one-pass": (
        "care",
        "has a single pass: its interval is an assumption, not a measurement",
        "have a single pass: their intervals are an assumption, not a measurement",
    ),
    "incomplete": (
        "care",
        "has fewer passes than the run: its device was lost",
        "have fewer passes than the run: their device was lost",
    ),
    "throttled": ("bad", "was measured while the device was throttled", "were measured while the device was throttled"),
}


def warnings(report: Report) -> list[Caution]:
    """All warnings, worst first; each is one line with a count."""
    out = [*_statuses(report.rows), *_flags(report.rows), *_runs(report), *_machine(report)]
    order = {"bad": 0, "care": 1, "note": 2}
    return sorted(out, key=lambda w: order[w.level])


def _who(rows: list[Row]) -> str:
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    return words.listed([words.short(n) for n in names], 3)


def _counted(level: str, rows: list[Row], one: str, many: str, query: dict[str, str]) -> Caution:
    return Caution(
        level, f"{words.count(len(rows), 'case')} {one if len(rows) == 1 else many}", query, f"({_who(rows)})"
    )


def _statuses(rows: list[Row]) -> list[Caution]:
    out = []
    for status, (level, one, many) in STATUS_WORDS.items():
        hit = [r for r in rows if r["status"] == status]
        if hit:
            out.append(_counted(level, hit, one, many, {"status": status}))
    return out


def _flags(rows: list[Row]) -> list[Caution]:
    hit: dict[str, list[Row]] = {}
    for row in rows:
        for flag in row.get("flags") or []:
            hit.setdefault(flag, []).append(row)
    out = []
    for flag, found in hit.items():
        shown = words.short(flag, 60)
        level, one, many = FLAG_WORDS.get(flag, ("care", f"has the finding “{shown}”", f"have the finding “{shown}”"))
        out.append(_counted(level, found, one, many, {"flags": flag}))
    return out


def _runs(report: Report) -> list[Caution]:
    """What the runs' descriptions say; runs of which the same is to be said share a line."""
    found: dict[tuple[str, str], list[str]] = {}
    for index, part in enumerate(report.parts):
        for level, text in _of_run(report, index, part):
            found.setdefault((level, text), []).append(words.short(report.labels[index], 40))
    out = []
    for (level, text), labels in found.items():
        of = f"{'Run' if len(labels) == 1 else 'Runs'} {words.listed(labels)}: " if report.several else ""
        out.append(Caution(level, (of + text)[:1].upper() + (of + text)[1:], {}))
    return out + _overlaps(report)


def _of_run(report: Report, index: int, part: Part) -> list[tuple[str, str]]:
    """(level, text) of one run."""
    out = []
    rows = [row for row in report.rows if index in row["parts"]]
    missing = _missing(report, index, part, len(rows))
    if missing:
        out.append(("care", f"{words.count(missing, 'planned case')} not measured."))
    whole = report.run.meta
    if whole["interrupted"] or not whole["ended"]:  # a folder of several may have been continued to its end since
        if part["interrupted"]:
            out.append(("care", "interrupted before it was done; continue it with --resume."))
        elif not part["ended"]:
            out.append(("care", "has no end: still going, or killed; continue it with --resume."))
    lost = part.get("lost")
    for key, why in lost.items() if isinstance(lost, dict) else ():
        out.append(("bad", f"device {words.short(key, 60)} was given up: {words.short(str(why), 200)}."))
    if part["damaged"]:
        out.append(("care", f"{words.count(part['damaged'], 'journal line')} could not be read."))
    selftest = part["selftest"] or whole["selftest"]
    if rows and not selftest:
        text = "no self-test of this machine, so how small a difference can be trusted is not known"
        out.append(("note", f"{text}: spikemark selftest --out RUN adds it."))
    elif rows and answers.smallest_difference({"selftest": selftest}) is None:
        out.append(
            ("care", "the self-test of this machine found none of its delays reliably: trust only large factors.")
        )
    return out


def _missing(report: Report, index: int, part: Part, found: int) -> int:
    """Cases that a run was to measure and that no run has measured in one of its environments."""
    if not report.several:
        return len(part["unmeasured"]) or max(part["planned"] - found, 0)
    places = list(part["environments"]) or list(environments.named(report))
    measured = {(row["key"], row["environment"]) for row in report.rows}
    lacking = [key for key in part["unmeasured"] if not any((key, place) in measured for place in places)]
    beside = sum(row["environment"] in places for row in report.rows)
    return len(lacking) or (max(part["planned"] - beside, 0) if not part["ended"] else 0)


def _overlaps(report: Report) -> list[Caution]:
    """Two runs whose times overlap on the same machine disturbed each other."""
    out = []
    for i, one in enumerate(report.parts):
        for j, other in enumerate(report.parts[:i]):
            if _machine_of(one) != _machine_of(other) or not _machine_of(one):
                continue
            whole = all(isinstance(m[k], str) for m in (one, other) for k in ("started", "ended"))
            if whole and one["started"] < other["ended"] and other["started"] < one["ended"]:
                pair = f"Runs {words.clean(report.labels[j])} and {words.clean(report.labels[i])}"
                same = "on one machine, or on two that cannot be told apart, at the same time"
                out.append(Caution("bad", f"{pair} were measured {same}.", {}))
    return out


def _machine_of(part: Part) -> str:
    """What is known of the machine beside its devices."""
    found = set()
    for environment in part["environments"].values():
        cpu, node = environment.get("cpu") or {}, environment.get("node") or {}
        found.add(repr([cpu.get("model"), cpu.get("memory_bytes"), node.get("id")]))
    return repr(sorted(found))


def _machine(report: Report) -> list[Caution]:
    """A machine that did something else meanwhile."""
    busy: dict[str, float] = {}
    for part in report.parts:
        for key, environment in part["environments"].items():
            cpu = environment.get("cpu") or {}
            load, cores = words.number(cpu.get("load")), words.number(cpu.get("cores"))
            if load is not None and cores and load > 0.5 * cores:
                where = words.short(f"{part['name']} · {base_key(key)}" if report.several else key, 40)
                busy[f"{where}: load {load:.1f} on {cores:.0f} cores"] = load
    if not busy:
        return []
    worst = sorted(busy, key=lambda text: -busy[text])
    who = worst[0] if len(worst) == 1 else f"{worst[0]}; {words.count(len(worst) - 1, 'other')}"
    return [Caution("care", f"The machine was busy before the run began ({who}).", {})]
