"""Numbers and names as a person reads them: units, as many digits as the interval allows, harmless names."""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from typing import Any

ABSENT = "–"
_TIME_UNITS = ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (math.inf, 1.0, "s"))
_SIZE_UNITS = ((1e3, 1.0, "B"), (1e6, 1e-3, "kB"), (1e9, 1e-6, "MB"), (1e12, 1e-9, "GB"), (math.inf, 1e-12, "TB"))
# C0/C1 controls have no picture; bidirectional overrides would reorder the text around a name.
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def number(value: Any) -> float | None:
    """``value`` as a finite float, or None: what may be drawn, sorted and compared."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _not_finite(value: Any) -> str | None:
    """The words for something that is no finite number; None for one that is."""
    if value is None or isinstance(value, (bool, str)):
        return ABSENT
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    return None


def decimals(value: float, half: float | None) -> int:
    """Decimals of ``value`` that its interval's half-width ``half`` allows (negative: round to tens ...).

    The half-width's first digit is the last one shown, its second if the first is a 1; at least 1 and at most 4
    significant digits of the value, and 3 where there is no interval.
    """
    lead = math.floor(math.log10(abs(value))) if value else 0
    if half is None or not math.isfinite(half):
        return max(2 - lead, 0)
    if half <= 0:
        return max(3 - lead, 0)
    place = -math.floor(math.log10(half))
    if half * 10.0**place < 2:
        place += 1
    return max(min(place, 3 - lead), -lead)


def _fixed(value: float, places: int) -> str:
    return f"{round(value, places):,.{max(places, 0)}f}"


def _bound(end: float, value: float, places: int) -> str:
    """An end of the interval of ``value`` with its decimals, more if it would show no digit but zeros.

    An end ten times above the value has two significant digits at most: 14,000 beside 700, not 13,700.
    """
    if not end:
        return _fixed(end, max(places, 0))
    lead = math.floor(math.log10(abs(end)))
    if abs(end) >= 10 * abs(value):
        places = min(places, 1 - lead)
    return _fixed(end, max(places, -lead))


def _half(low: Any, high: Any) -> float | None:
    low, high = number(low), number(high)
    return None if low is None or high is None else abs(high - low) / 2


def _unit(value: float, units: tuple[tuple[float, float, str], ...]) -> tuple[float, str]:
    return next((factor, name) for limit, factor, name in units if abs(value) < limit)


def _placed(value: float, half: float | None, factor: float) -> tuple[float, int]:
    """``value`` in a unit, and its decimals there."""
    return value * factor, decimals(value * factor, None if half is None else half * factor)


@functools.lru_cache(maxsize=1 << 16)  # a time is written in the table, in its details and in answers and pictures
def _scaled(value: float, low: Any, high: Any, units: tuple[tuple[float, float, str], ...]) -> tuple[str, str]:
    """``value`` and its interval in one unit: "1.234 ms" and "1.21–1.25 ms" (empty without an interval)."""
    half = _half(low, high)
    factor, name = _unit(value, units)
    scaled, places = _placed(value, half, factor)
    if abs(round(scaled, places)) >= 1000 and name != units[-1][2]:  # 999.6 µs known to 10 µs is 1 ms, not 1,000 µs
        value = round(scaled, places) / factor
        factor, name = next((f, n) for _, f, n in units if f < factor)
        scaled, places = _placed(value, half, factor)
    text = f"{_fixed(scaled, places)} {name}"
    if half is None:
        return text, ""
    return text, f"{_bound(low * factor, scaled, places)}–{_bound(high * factor, scaled, places)} {name}"


def seconds(value: Any, low: Any = None, high: Any = None) -> str:
    """A time with its unit."""
    return _not_finite(value) or _scaled(value, low, high, _TIME_UNITS)[0]


def seconds_interval(value: Any, low: Any, high: Any) -> str:
    """The interval of a time in the unit of its value; empty if there is none."""
    return "" if _not_finite(value) else _scaled(value, low, high, _TIME_UNITS)[1]


def time_unit(value: float) -> tuple[float, str]:
    """Factor from seconds and name of the unit that ``value`` seconds read well in."""
    return _unit(value, _TIME_UNITS)


@functools.lru_cache(maxsize=4096)
def size(value: Any) -> str:
    """A number of bytes, decimal units, three digits: "315 MB"."""
    words = _not_finite(value)
    if words:
        return words
    if abs(value) < 1000:
        return f"{int(value)} B"
    return _scaled(value, None, None, _SIZE_UNITS)[0]


def bandwidth(value: Any) -> str:
    """Bytes a second: "11.2 GB/s"."""
    words = _not_finite(value)
    return words or f"{size(value)}/s"


def factor(value: Any, low: Any = None, high: Any = None) -> str:
    """A ratio: "11.8×"."""
    words = _not_finite(value)
    return words or f"{_fixed(value, decimals(value, _half(low, high)))}×"


def factor_interval(value: Any, low: Any, high: Any) -> str:
    """The interval of a ratio, with the ratio's digits; empty if there is none."""
    half = _half(low, high)
    if _not_finite(value) or half is None:
        return ""
    places = decimals(value, half)
    return f"{_bound(low, value, places)}–{_bound(high, value, places)}"


def percent(value: Any, low: Any = None, high: Any = None) -> str:
    """A fraction in percent, up to three digits or as its interval allows: 0.1234 -> "12.3 %"."""
    words = _not_finite(value)
    if words:
        return words
    half = _half(low, high)
    return f"{_fixed(value * 100, min(decimals(value * 100, None if half is None else half * 100), 2))} %"


def rate(value: Any) -> str:
    """A firing rate or limit that was asked for, exactly: 0.05 -> "5 %"."""
    return _not_finite(value) or f"{value * 100:.6g} %"


def plain(value: Any) -> str:
    """Any other number, six significant digits; whole numbers with their thousands apart."""
    words = _not_finite(value)
    if words:
        return words
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def count(n: int, one: str, many: str | None = None) -> str:
    """ "1 case", "3 cases"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def clean(text: Any) -> str:
    """``text`` without control characters and bidirectional overrides, so that it can be shown and encoded anywhere."""
    return _UNSEEN.sub("\ufffd", str(text))


def short(text: Any, limit: int = 28) -> str:
    """``text`` in at most ``limit`` characters, cut in the middle: both ends of a name tell names apart."""
    text = clean(text)
    if len(text) <= limit:
        return text
    head, tail = text[: (limit - 1) * 3 // 5], text[len(text) - (limit - 1 - (limit - 1) * 3 // 5) :]
    while tail and unicodedata.combining(tail[0]):
        tail = tail[1:]
    return f"{head}…{tail}"


def listed(names: list[str], limit: int = 4) -> str:
    """ "a, b and 3 more"."""
    shown = [clean(n) for n in names[:limit]]
    if len(names) > limit:
        return f"{', '.join(shown)} and {len(names) - limit} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
