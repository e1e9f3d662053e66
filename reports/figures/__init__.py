"""Which pictures a report has, and which of them are drawn when there are too many. Imports matplotlib, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from spikemark.reports import environments
from spikemark.reports.answers import Answer
from spikemark.reports.figures import bars, charts, heat, strips
from spikemark.reports.figures.palette import Look, looks
from spikemark.reports.figures.picture import Picture
from spikemark.reports.rows import Report

__all__ = ["Look", "Picture", "choose", "looks", "pictures"]

MOST = 40
"""Pictures on one page. More cost seconds and nobody looks at them; ``--figures`` writes them all."""
_KINDS = ("speed", "memory", "heat", "pareto", "sweep", "rate", "roofline", "devices", "samples")
"""What is drawn first when not everything is."""


def pictures(report: Report, found: list[Answer], devices: tuple[str, str] | None = None) -> list[Picture]:
    """Every picture, not yet drawn, by operator and environment: different environments never share one.

    ``devices`` names the two devices whose times are divided; otherwise the first pairs that may be compared.
    """
    styles = looks(row["implementation"] for row in report.rows)
    groups: dict[tuple[str, str], list[Answer]] = {}
    for answer in found:
        row = answer.first
        groups.setdefault((row["environment"], row["operator"]), []).append(answer)
    several = len({environment for environment, _ in groups}) > 1
    out: list[Picture] = []
    for (environment, operator), answers in groups.items():
        where = f" · {environments.title(report, environment)}" if several else ""
        out += _of_operator(f"{operator}{where}", answers, styles)
    for place in dict.fromkeys(environment for environment, _ in groups):
        rows = [row for row in report.rows if row["environment"] == place]
        where = f" · {environments.title(report, place)}" if several else ""
        out += strips.roofline(f"All operators{where}", rows, styles)
    return out + list(heat.device_pictures(report, devices))


def _of_operator(section: str, answers: list[Answer], styles: dict[str, Look]) -> Iterable[Picture]:
    yield from bars.pictures(section, answers, styles)
    yield from heat.pictures(section, answers)
    yield from charts.pareto(section, answers, styles)
    yield from charts.sweeps(section, answers, styles)
    yield from strips.samples(section, answers, styles)


def choose(every: list[Picture], most: int = MOST) -> tuple[list[Picture], list[Picture]]:
    """(drawn, left out), both in their order: one picture of each kind at least, then kinds by importance."""
    ranked = sorted(every, key=lambda p: _KINDS.index(p.kind))
    firsts = {id(next(p for p in ranked if p.kind == kind)) for kind in {p.kind for p in ranked}}
    chosen = sorted(ranked, key=lambda p: id(p) not in firsts)[:most]
    kept = {id(p) for p in chosen}
    return [p for p in every if id(p) in kept], [p for p in every if id(p) not in kept]
