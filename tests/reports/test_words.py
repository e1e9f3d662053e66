"""Numbers with units and as many digits as their interval allows; names made harmless."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spikemark.reports import words


@pytest.mark.parametrize(
    ("value", "low", "high", "text", "interval"),
    [
        (1.2345e-3, None, None, "1.23 ms", ""),
        (1.2345e-3, 1.21e-3, 1.26e-3, "1.23 ms", "1.21–1.26 ms"),
        (1.2345e-3, 1.2344e-3, 1.2346e-3, "1.234 ms", "1.234–1.235 ms"),
        (1.2345e-3, 0.8e-3, 1.7e-3, "1.2 ms", "0.8–1.7 ms"),
        (340e-6, 220e-6, 460e-6, "340 µs", "220–460 µs"),
        (12.4e-9, 12.2e-9, 12.7e-9, "12.4 ns", "12.2–12.7 ns"),
        (75.0, 74.0, 76.0, "75.0 s", "74.0–76.0 s"),
        (30e-3, 2e-3, 500e-3, "30 ms", "2–500 ms"),
        (700e-6, 40e-6, 13_700e-6, "700 µs", "40–14,000 µs"),
        (1000.4e-6, 200e-6, 8e-3, "1 ms", "0.2–8 ms"),
        (999.6e-6, 900e-6, 1_100e-6, "1.00 ms", "0.90–1.10 ms"),
        (0.99996, None, None, "1.00 s", ""),
        (0.5, 0.5, 0.5, "500.0 ms", "500.0–500.0 ms"),
    ],
)
def test_a_time_shows_the_digits_its_interval_allows(
    value: float, low: float | None, high: float | None, text: str, interval: str
) -> None:
    assert words.seconds(value, low, high) == text
    assert words.seconds_interval(value, low, high) == interval


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (11.83, 11.2, 12.4, "11.8×"),
        (11.83, None, None, "11.8×"),
        (0.00875, 0.006, 0.012, "0.009×"),
        (0.00875, 0.001, 5.0, "0.009×"),
        (1250.0, 1100.0, 1400.0, "1,250×"),
        (1.0, 1.0, 1.0, "1.000×"),
    ],
)
def test_a_ratio_never_shows_zeros_only(value: float, low: float | None, high: float | None, text: str) -> None:
    assert words.factor(value, low, high) == text


@given(st.floats(1e-9, 1e3), st.floats(0, 5), st.floats(0, 5))
def test_what_is_written_lies_within_a_half_width_of_the_value(value: float, below: float, above: float) -> None:
    low, high = value / (1 + below), value * (1 + above)
    text = words.seconds(value, low, high)
    number, unit = text.split(" ")
    shown = float(number.replace(",", "")) * {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert abs(shown - value) <= max((high - low) / 2, value * 1e-3) * 1.01
    assert shown > 0


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [(6.0, 0.2, 202.0, "0.2–200"), (30.0, 6.0, 160.0, "6–160"), (4.2, 3.1, 5.6, "3.1–5.6")],
)
def test_the_far_end_of_a_wide_interval_has_two_digits(value: float, low: float, high: float, text: str) -> None:
    assert words.factor_interval(value, low, high) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (math.nan, "not a number"), (math.inf, "infinite")])
def test_what_is_no_number_is_said_in_words(value: float | None, text: str) -> None:
    for write in (words.seconds, words.size, words.factor, words.percent, words.plain, words.bandwidth):
        assert write(value) == text
    assert words.factor_interval(value, 1.0, 2.0) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (314_572_800, "315 MB"),
        (1_000, "1.00 kB"),
        (999_999, "1.00 MB"),
        (2.5e12, "2.50 TB"),
    ],
)
def test_sizes_are_decimal_with_three_digits(value: float, text: str) -> None:
    assert words.size(value) == text


def test_percent_has_no_more_than_two_decimals() -> None:
    assert [words.percent(x) for x in (0.1234, 0.005, 1.0, 0.00012)] == ["12.3 %", "0.50 %", "100 %", "0.01 %"]


def test_rates_asked_for_are_written_exactly() -> None:
    assert [words.rate(x) for x in (0.1, 0.005, 0.35, 1.0, 0.1 + 0.2, None)] == [
        "10 %",
        "0.5 %",
        "35 %",
        "100 %",
        "30 %",
        "–",
    ]


def test_names_lose_what_has_no_picture_and_keep_everything_else() -> None:
    assert words.clean("a\x00b\u202ec\ud800d") == "a\ufffdb\ufffdc\ufffdd"
    assert words.clean("<script> עברית 🧠 \\ $x$ \"'") == "<script> עברית 🧠 \\ $x$ \"'"
    words.clean("\ud800").encode("utf-8")


def test_a_long_name_is_cut_in_the_middle() -> None:
    short = words.short("abcdefghij" * 30 + "END", 20)
    assert len(short) == 20 and short.startswith("abc") and short.endswith("END") and "…" in short
    assert words.short("exactly", 7) == "exactly"


def test_lists_say_how_many_are_left() -> None:
    wanted = ["", "a", "a and b", "a, b and c", "a, b, c and 1 more"]
    assert [words.listed(list("abcd"[:n]), 3) for n in range(5)] == wanted
