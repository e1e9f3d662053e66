"""At which firing rate another implementation becomes the fastest, as far as what was measured can tell.

At each measured rate some implementations are the fastest or not clearly slower (``statistics.summarise`` decides, pass
by pass); the others are clearly slower. A break-even is claimed only between two rates of which the first is clearly
the one's and the second clearly the other's: rates between them at which neither is clearly faster widen the claim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spikemark.reports import words
from spikemark.reports.rows import Row

Lines = Mapping[str, Sequence[Row]]
"""implementation -> its rows of one workload and size, at several rates."""


@dataclass(frozen=True)
class BreakEven:
    """``below`` is clearly faster at the rate ``low``, ``above`` at ``high``; their medians are equal at ``rate``."""

    rate: float
    low: float
    high: float
    below: str
    above: str

    @property
    def about(self) -> str:
        """``rate`` in percent to two digits: more it does not have."""
        return words.rate(float(f"{self.rate:.2g}"))

    @property
    def text(self) -> str:
        """One line, without a full stop."""
        below, above = words.clean(self.below), words.clean(self.above)
        between = f"between {words.rate(self.low)} and {words.rate(self.high)}"
        return f"Break-even at about {self.about} ({between}): {below} below, {above} above"


def break_evens(lines: Lines) -> list[BreakEven]:
    """All changes of the fastest along the rate, lowest first; of several between the same rates the first there."""
    at = {name: {r["rate_asked"]: r for r in rows if r["rate_asked"] > 0} for name, rows in lines.items()}
    found: dict[tuple[float, float], BreakEven] = {}
    for a, b in itertools.permutations(at, 2):
        for change in _changes(a, b, at[a], at[b]):
            key = (change.low, change.high)
            if key not in found or _order(change, at) < _order(found[key], at):
                found[key] = change
    return [found[key] for key in sorted(found)]


def _order(change: BreakEven, at: Mapping[str, Mapping[float, Row]]) -> tuple[float, ...]:
    """Of changes between the same rates, the one between the fastest at either end counts."""
    return (at[change.below][change.low]["median_s"], at[change.above][change.high]["median_s"])


def _changes(below: str, above: str, one: Mapping[float, Row], other: Mapping[float, Row]) -> list[BreakEven]:
    """Where ``below`` stops and ``above`` begins to be the clearly faster of the two, and among the fastest of all."""
    rates = sorted(set(one) & set(other))
    leads = {x: _lead(one[x], other[x]) for x in rates}
    decided = [x for x in rates if leads[x]]
    out = []
    for low, high in itertools.pairwise(decided):
        if leads[low] > leads[high]:
            between = [x for x in rates if low <= x <= high]
            out.append(BreakEven(_equal(between, one, other), low, high, below, above))
    return out


def _lead(one: Row, other: Row) -> int:
    """1 where ``one`` is among the fastest and ``other`` clearly is not, -1 the other way round, else 0."""
    lead = bool(one["winner"]) - bool(other["winner"])
    return lead if lead * (other["median_s"] - one["median_s"]) > 0 else 0


def _equal(rates: Sequence[float], one: Mapping[float, Row], other: Mapping[float, Row]) -> float:
    """The first rate at which the medians are equal, interpolated in logarithms."""
    for low, high in itertools.pairwise(rates):
        start, end = (math.log(one[x]["median_s"] / other[x]["median_s"]) for x in (low, high))
        if start < 0 <= end:
            return low * (high / low) ** (start / (start - end))
    return rates[-1]


def always_fastest(lines: Lines) -> list[str]:
    """Implementations that no other beat clearly at any of several measured rates."""
    rates = {r["rate_asked"] for rows in lines.values() for r in rows if r["rate_asked"] > 0}
    if len(rates) < 2 or len(lines) < 2:
        return []
    wins = {name: {r["rate_asked"] for r in rows if r["winner"]} for name, rows in lines.items()}
    return [name for name, won in wins.items() if won >= rates]


def sentence(lines: Lines) -> str:
    """What the rates tell, in one or more sentences; empty with one rate or one implementation."""
    changes = break_evens(lines)
    if changes:
        return " ".join(f"{change.text}." for change in changes)
    names = always_fastest(lines)
    if not names:
        return ""
    rates = [r["rate_asked"] for rows in lines.values() for r in rows if r["rate_asked"] > 0]
    who = words.listed(names, 4)
    span = f"{words.rate(min(rates))} to {words.rate(max(rates))}"
    return f"No break-even from {span}: {who} {'is' if len(names) == 1 else 'are'} not clearly beaten at any rate."
