"""The first screen's content: who wins each comparison, how surely, and what a reader must know before believing it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spikemark.harness.records import OK
from spikemark.harness.statistics import geometric_mean
from spikemark.reports import words
from spikemark.reports.rows import Report, Row

CLEAR, TIE, NOISE, ALONE, UNCHECKED = "clear", "tie", "within noise", "no rival", "clear, noise unchecked"
DISTURBED, ONE_PASS = "disturbed", "one pass only"
_DISTURBING = ("shared-device", "throttled", "code-changed", "environment-changed")
NO_WINNER = "nothing to choose"


@dataclass
class Answer:
    """One comparison: implementations of one operator, phase, workload, size and dtype in one environment.

    ``winner`` is the fastest right implementation (None if none has a time), ``tied`` those not clearly slower
    (``statistics.summarise`` decides). ``surety`` is one of the words above.
    ``lead`` is the runner-up's time over the winner's.
    """

    rows: list[Row]
    winner: Row | None = None
    baseline: Row | None = None
    tied: list[Row] = field(default_factory=list)
    lead: float | None = None
    surety: str = NO_WINNER

    @property
    def first(self) -> Row:
        """Any row: what all rows of the comparison share can be read from it."""
        return self.rows[0]

    @property
    def names(self) -> list[str]:
        """The winner and who is tied with it."""
        return [r["implementation"] for r in ([self.winner] if self.winner else []) + self.tied]


def timed(row: Row) -> bool:
    """Whether a row has a time that can be compared."""
    median = words.number(row.get("median_s"))
    return row["status"] == OK and median is not None and median > 0


def answers(report: Report) -> list[Answer]:
    """One answer a comparison, in the order of the rows."""
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in report.rows:
        grouped.setdefault((row["environment"], row["group"], row["variant"]), []).append(row)
    return [_answer(rows, _noise(report, rows)) for rows in grouped.values()]


def _noise(report: Report, rows: list[Row]) -> float | None:
    """Smallest difference that can be told on the machines of all runs that the rows come from; None if not known."""
    found = [smallest_difference(report.parts[index]) for index in {i for row in rows for i in row["parts"]}]
    known = [noise for noise in found if noise is not None]
    return max(known) if len(known) == len(found) and known else smallest_difference(report.run.meta)


def smallest_difference(meta: dict[str, Any]) -> float | None:
    """Smallest ratio minus 1 that the machine's own A/A test could tell from noise, if the run has one."""
    selftest = meta.get("selftest")
    return words.number(selftest.get("smallest_difference")) if isinstance(selftest, dict) else None


def _answer(rows: list[Row], noise: float | None) -> Answer:
    out = Answer(rows, baseline=next((r for r in rows if r["baseline"]), None))
    ranked = sorted((r for r in rows if timed(r)), key=lambda r: (r["median_s"], r["implementation"]))
    if not ranked:
        return out
    out.winner = best = ranked[0]
    out.tied = [r for r in ranked[1:] if r["winner"] == "tied"]
    if len(ranked) == 1:
        out.surety = ALONE
        return out
    out.lead = ranked[1]["median_s"] / best["median_s"]
    if out.tied:
        out.surety = TIE
    elif any(flag in _DISTURBING for r in ranked[:2] for flag in r["flags"]):
        out.surety = DISTURBED
    elif any("one-pass" in r["flags"] for r in ranked[:2]):
        out.surety = ONE_PASS
    elif noise is None:
        out.surety = UNCHECKED
    else:
        out.surety = CLEAR if out.lead > 1 + noise else NOISE
    return out


def time_ratio(over: Row, under: Row) -> tuple[float, float | None, float | None]:
    """Time of one row over another's, with the widest interval that theirs allow."""
    low, high = (words.number(over[n]) for n in ("ci_low_s", "ci_high_s"))
    least, most = (words.number(under[n]) for n in ("ci_low_s", "ci_high_s"))
    ratio = over["median_s"] / under["median_s"]
    if low is None or high is None or not least or not most:
        return ratio, None, None
    return ratio, low / most, high / least


def _peak_ratio(answer: Answer) -> float | None:
    """Winner's peak memory over the baseline's, if both are known."""
    peaks = [words.number(row["peak_bytes"]) if row else None for row in (answer.winner, answer.baseline)]
    return peaks[0] / peaks[1] if peaks[0] and peaks[1] else None


@dataclass
class Section:
    """All answers of one operator and phase in one environment, and their summary in one line."""

    operator: str
    phase: str
    title: str
    answers: list[Answer]

    @property
    def wins(self) -> list[tuple[str, int]]:
        """(implementation, comparisons it won alone), most first."""
        counts: dict[str, int] = {}
        for answer in self.answers:
            if answer.winner and not answer.tied:
                name = answer.winner["implementation"]
                counts[name] = counts.get(name, 0) + 1
        return sorted(counts.items(), key=lambda item: -item[1])

    @property
    def summary(self) -> str:
        """ "native fastest in 7 of 8 (11.3× the baseline on average), 1 tie"."""
        decided = [a for a in self.answers if a.winner]
        if not decided:
            return "no implementation has a time"
        parts = [f"{words.short(name, 40)} fastest in {n} of {len(decided)}" for name, n in self.wins[:2]]
        if self.wins:
            top = self.wins[0][0]
            if any(a.winner["baseline"] for a in decided if a.winner and a.winner["implementation"] == top):
                parts[0] += " (the baseline)"
                return self._with_ties(parts)
            gains = [a.winner.get("speedup") for a in decided if a.winner and a.winner["implementation"] == top]
            mean, used, _ = geometric_mean(gains)
            if used and parts:
                parts[0] += f", {words.factor(mean)} the baseline" + (" (geometric mean)" if used > 1 else "")
            peaks = [_peak_ratio(a) for a in decided if a.winner and a.winner["implementation"] == top]
            mean, used, _ = geometric_mean(peaks)
            if used:
                parts[0] += f" with {words.factor(mean)} its memory"
        return self._with_ties(parts)

    def _with_ties(self, parts: list[str]) -> str:
        tied = [a.names for a in self.answers if a.winner and a.tied]
        if tied:
            who = words.listed([words.short(n, 30) for n in dict.fromkeys(n for names in tied for n in names)], 3)
            parts.append(f"{words.count(len(tied), 'tie')} ({who})")
        for surety in (DISTURBED, ONE_PASS, NOISE):
            if n := sum(a.surety == surety for a in self.answers):
                parts.append(f"{n} {surety}")
        return "; ".join(parts)


def sections(report: Report, found: list[Answer], title: Any) -> list[Section]:
    """Answers by operator, phase and environment; ``title(environment)`` names the environment."""
    out: dict[tuple[Any, ...], Section] = {}
    for answer in found:
        row = answer.first
        key = (row["environment"], row["operator"], row["phase"])
        if key not in out:
            out[key] = Section(row["operator"], row["phase"], title(row["environment"]), [])
        out[key].answers.append(answer)
    return list(out.values())


SHARED_BY = {
    "batch": lambda r: f"batch {r['batch']}",
    "time_steps": lambda r: f"T {r['time_steps']}",
    "rate_asked": lambda r: f"rate {words.rate(r['rate_asked'])}",
    "dtype": lambda r: words.clean(r["dtype"]),
}
"""What may tell two comparisons of one workload apart, and how it is written."""


def varying(rows: list[Row]) -> list[str]:
    """Names in ``SHARED_BY`` that have several values for one workload among ``rows``."""
    out = []
    for name in SHARED_BY:
        seen: dict[str, Any] = {}
        if any(seen.setdefault(r["workload"], r[name]) != r[name] for r in rows):
            out.append(name)
    return out


def size_words(row: Row, names: list[str]) -> str:
    """ "batch 8, T 12": what tells this comparison from its neighbours."""
    return ", ".join(SHARED_BY[n](row) for n in names)
