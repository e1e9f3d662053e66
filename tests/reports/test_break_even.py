"""Break-even firing rates: claimed where both ends are clear, widened where not, denied where nobody is beaten."""

from __future__ import annotations

from typing import Any

import pytest
from spikemark.reports.break_even import BreakEven, always_fastest, break_evens, sentence


def line(*points: tuple[float, float, str]) -> list[dict[str, Any]]:
    """Rows of (rate, median in seconds, ``winner``)."""
    return [{"rate_asked": rate, "median_s": median, "winner": winner} for rate, median, winner in points]


def test_it_lies_where_the_medians_meet_in_logarithms() -> None:
    lines = {
        "event": line((0.01, 1.0, "alone"), (0.04, 4.0, "")),
        "dense": line((0.01, 2.0, ""), (0.04, 2.0, "alone")),
    }
    (found,) = break_evens(lines)
    assert found.rate == pytest.approx(0.02)
    assert found == BreakEven(found.rate, 0.01, 0.04, "event", "dense")
    assert sentence(lines) == "Break-even at about 2 % (between 1 % and 4 %): event below, dense above."


def test_rates_at_which_neither_is_clearly_faster_widen_the_claim() -> None:
    lines = {
        "event": line((0.01, 1.0, "alone"), (0.02, 1.8, "tied"), (0.04, 2.2, "tied"), (0.08, 8.0, "")),
        "dense": line((0.01, 2.0, ""), (0.02, 2.0, "tied"), (0.04, 2.0, "tied"), (0.08, 2.0, "alone")),
    }
    (found,) = break_evens(lines)
    assert (found.low, found.high) == (0.01, 0.08)
    assert 0.02 < found.rate < 0.04


def test_overlapping_intervals_make_no_claim_however_the_medians_lie() -> None:
    lines = {
        "event": line((0.01, 1.0, "tied"), (0.04, 1.2, "tied")),
        "dense": line((0.01, 1.1, "tied"), (0.04, 1.1, "tied")),
    }
    assert break_evens(lines) == []
    assert sentence(lines) == "No break-even from 1 % to 4 %: event and dense are not clearly beaten at any rate."
    # Clear at one end only.
    lines["event"][0]["winner"], lines["dense"][0]["winner"] = "alone", ""
    assert break_evens(lines) == []
    assert always_fastest(lines) == ["event"]


def test_one_that_takes_the_better_path_everywhere_hides_no_break_even_of_the_others() -> None:
    lines = {
        "auto": line((0.01, 1.02, "tied"), (0.04, 2.0, "tied")),
        "event": line((0.01, 1.0, "tied"), (0.04, 4.0, "")),
        "dense": line((0.01, 2.0, ""), (0.04, 2.01, "tied")),
        "slow": line((0.01, 9.0, ""), (0.04, 9.0, "")),
    }
    (found,) = break_evens(lines)
    assert (found.below, found.above) == ("event", "dense")


def test_a_lead_that_the_medians_deny_does_not_count() -> None:
    # Tied by a wide interval, but slower by its median than one that is clearly beaten.
    lines = {
        "wide": line((0.01, 1.5, "tied"), (0.04, 9.0, "")),
        "beaten": line((0.01, 1.3, ""), (0.04, 1.0, "alone")),
        "best": line((0.01, 1.0, "tied"), (0.04, 3.0, "")),
    }
    assert {(b.below, b.above) for b in break_evens(lines)} == {("best", "beaten")}


def test_there_and_back_again_are_two() -> None:
    lines = {
        "a": line((0.01, 1.0, "alone"), (0.02, 3.0, ""), (0.04, 1.0, "alone")),
        "b": line((0.01, 2.0, ""), (0.02, 1.0, "alone"), (0.04, 2.0, "")),
    }
    assert [(b.below, b.above) for b in break_evens(lines)] == [("a", "b"), ("b", "a")]


@pytest.mark.parametrize(
    "lines",
    [
        {},
        {"a": line((0.01, 1.0, "alone"))},
        {"a": line((0.01, 1.0, "alone"), (0.02, 1.0, "alone"))},
        {"a": line((0.0, 1.0, "alone"), (0.02, 1.0, "alone")), "b": line((0.0, 2.0, ""), (0.02, 2.0, ""))},
    ],
)
def test_one_rate_or_one_implementation_says_nothing(lines: dict[str, Any]) -> None:
    assert break_evens(lines) == []
    assert sentence(lines) == ""
