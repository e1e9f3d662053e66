"""A matplotlib figure with one pair of coordinates: points (1/72 inch) from the top left corner.

Labels, bars and grid are drawn by hand on the bare figure: matplotlib's axes and ticks would take three times as long,
which decides whether a report of forty pictures takes one second or three.
"""

from __future__ import annotations

import io
import math
import re
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Affine2D
from spikemark.reports import words

WIDTH = 330.0
"""Points of most pictures: on a phone of 390 pixels their smallest texts then still have 9."""
INK, MUTED, GRID, PAPER = "#1b1e24", "#565d68", "#d9dce1", "#fefefe"
"""Colours that follow the page's light or dark theme; no implementation has one of them."""
_THEME = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)"}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "hatch.linewidth": 0.6,
}


class Canvas:
    """A picture of ``width`` x ``height`` points, origin top left, y downwards."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        with mpl.rc_context(_SETTINGS):
            self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
            FigureCanvasSVG(self.figure)
        flip = Affine2D().scale(1 / 72, -1 / 72).translate(0, height / 72)
        self._place: Any = flip + self.figure.dpi_scale_trans

    def text(self, x: float, y: float, text: str, size: float = 9, color: str = INK, **more: Any) -> None:
        """Text at (x, y); ``ha``, ``va``, ``weight``, ``rotation`` as in matplotlib."""
        style: dict[str, Any] = {"va": "center", "parse_math": False} | more
        self.figure.text(x, y, words.clean(text), fontsize=size, color=color, transform=self._place, **style)

    def bars(self, boxes: Sequence[tuple[float, float, float, float]], colors: Sequence[str], **more: Any) -> None:
        """Boxes (x, y, width, height), each in its colour with a thin ink outline."""
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
        style: dict[str, Any] = {"facecolors": colors, "edgecolors": INK, "linewidths": 0.5} | more
        self.figure.add_artist(PolyCollection(corners, transform=self._place, **style))

    def lines(
        self, ends: Iterable[tuple[float, float, float, float]], color: str = INK, width: float = 1.0, **more: Any
    ) -> None:
        """Straight lines from (x0, y0) to (x1, y1)."""
        segments = [[(x0, y0), (x1, y1)] for x0, y0, x1, y1 in ends]
        style: dict[str, Any] = {"colors": color, "linewidths": width, "zorder": 2} | more
        self.figure.add_artist(LineCollection(segments, transform=self._place, **style))

    def curve(self, xs: Sequence[float], ys: Sequence[float], color: str, marker: str = "", **more: Any) -> None:
        """A line through points, with a marker on each; ``linestyle="none"`` for points alone."""
        style: dict[str, Any] = {
            "linewidth": 1.6,
            "markersize": 5.5,
            "markeredgecolor": INK,
            "markeredgewidth": 0.5,
        } | more
        self.figure.add_artist(Line2D(xs, ys, color=color, marker=marker, transform=self._place, **style))

    def characters(self) -> set[str]:
        """All characters that the picture's texts use."""
        return set("".join(text.get_text() for text in self.figure.texts))

    def save(self, path: Path, font: Path | None = None) -> None:
        """Write the picture alone, in light colours, as the suffix says (.svg, .pdf, .png), with ``font`` if given."""
        if font is not None:
            for text in self.figure.texts:
                text.get_fontproperties().set_file(font)
        with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
            metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
            self.figure.savefig(path, metadata=metadata or None)

    def svg(self, sheet: StyleSheet, prefix: str) -> str:
        """The picture as an inline ``<svg>`` element without style attributes: their rules go to ``sheet``.

        ``prefix`` makes its ids unique in the page.
        """
        out = io.StringIO()
        with mpl.rc_context(_SETTINGS | {"svg.hashsalt": prefix}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        return _inline(out.getvalue(), sheet, prefix, self.width, self.height)


class StyleSheet:
    """Style attributes of all pictures as classes: a strict content-security policy forbids ``style="..."``."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, style: str) -> str:
        """The class that stands for a style attribute's text."""
        for colour, variable in _THEME.items():
            style = style.replace(colour, variable)
        style = re.sub(r"font: ((?:\w+ )*?)([\d.]+)px [^;\"]*", _font, style)
        return self._names.setdefault(style, f"f{len(self._names)}")

    def css(self) -> str:
        """The rules of all classes handed out."""
        return "".join(f".{name}{{{style}}}" for style, name in self._names.items())


def _font(match: re.Match[str]) -> str:
    weight = next((w for w in match[1].split() if w.isdigit() or w == "bold"), "")
    return f"font-size: {match[2]}px" + (f"; font-weight: {weight}" if weight else "")


def _inline(text: str, sheet: StyleSheet, prefix: str, width: float, height: float) -> str:
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", body)
    body = re.sub(r'(href="|url\()#', rf"\g<1>#{prefix}-", body)
    body = re.sub(r' style="([^"]*)"', lambda m: f' class="{sheet.name(m[1])}"', body)
    # Hundredths of a point are enough; only inside tags: what is written stays as it is.
    body = re.sub(r"<[^>]+>", lambda m: re.sub(r"(\d\.\d\d)\d+", r"\1", m[0]), body)
    body = re.sub(r">\s+<", "><", body)
    size = f'width="{width * 96 / 72:.0f}" height="{height * 96 / 72:.0f}" viewBox="0 0 {width:g} {height:g}"'
    return f'<svg {size} aria-hidden="true" focusable="false">' + body[body.index(">") + 1 :]


class Scale:
    """Maps values to points along one direction, linearly or by logarithm, and knows good places for ticks."""

    def __init__(self, values: Iterable[float], start: float, end: float, *, log: bool) -> None:
        """``values`` are what must be visible."""
        known = list(values)
        self.start, self.end, self.log = start, end, log
        low, high = min(known), max(known)
        if log:
            room = max((high / low) ** 0.06, 1.12)
            low, high = low / room, high * room
        else:
            room = 0.06 * (high - low or abs(high) or 1.0)
            low, high = low - room, high + room
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        """Point of ``value``; values outside fall on the ends."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, wanted: int = 5) -> list[float]:
        """About ``wanted`` round values inside the scale."""
        return _log_ticks(self.low, self.high, wanted) if self.log else _linear_ticks(self.low, self.high, wanted)


def _linear_ticks(low: float, high: float, wanted: int) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / wanted))
    step *= next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= wanted)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float, wanted: int) -> list[float]:
    """The finest series that fits; where it has less than three ticks, whatever has the most of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    series = [
        [t for p in powers for f in factors if low <= (t := f * 10.0**p) <= high]
        for factors in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
    ]
    for ticks in series:
        if 3 <= len(ticks) <= wanted + 1:
            return ticks
    thinned = [ticks[:: math.ceil(len(ticks) / (wanted + 1))] for ticks in reversed(series) if ticks]
    return max([*thinned, _linear_ticks(low, high, wanted + 1)], key=len)


def text_width(text: str, size: float) -> float:
    """About how many points wide ``text`` is: East Asian letters and symbols take twice the room of Latin ones."""
    return size * sum(1.05 if _is_wide(c) else 0.59 for c in text)


def _is_wide(char: str) -> bool:
    return unicodedata.east_asian_width(char) in "WF" or unicodedata.category(char) in ("So", "Cn", "Co")


def longest_width(texts: Iterable[str], size: float) -> float:
    """Width of the longest of ``texts``, in points."""
    return max((text_width(text, size) for text in texts), default=0.0)
