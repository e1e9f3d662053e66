"""One colour, marker and hatch for an implementation everywhere, told apart by colour-blind readers too.

Okabe and Ito's palette, then Tol's muted one. Names that Spikemark ships have fixed colours, so two reports agree;
other names get what is left, in alphabetical order. A layer's implementation is a pair (``native+aten``) and has its
neuron's colour where that tells the pairs apart; pairs never share a scale with single names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GREY, BLUE, ORANGE, GREEN, PINK, RED = "#8c8c8c", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00"
SKY, YELLOW, WINE, PURPLE, INDIGO, TEAL, OLIVE = (
    "#56b4e9", "#f0e442", "#882255", "#aa4499", "#332288", "#44aa99", "#999933",
)  # fmt: skip
KNOWN = {
    "torch_eager": GREY,
    "torch_autograd": GREY,
    "torch": GREY,
    "native": BLUE,
    "torch_vectorized": ORANGE,
    "torch_compile": GREEN,
    "torch_unfold": PINK,
    "aten": RED,
    "cupy_raw": TEAL,
    "cupy_vectorized": YELLOW,
    "cupy_compact": WINE,
    "triton_fused": PURPLE,
    "cudnn_aten": INDIGO,
    "cudnn_transpose": TEAL,
    "cudnn_frontend": OLIVE,
    "native_compact": SKY,
    "native_event": SKY,
    "native_auto": BLUE,
    "cupy_event": WINE,
    "torch_eager+torch_autograd": GREY,
    "torch_eager+aten": RED,
    "torch_vectorized+aten": ORANGE,
    "torch_compile+aten": GREEN,
    "native+aten": BLUE,
    "native_compact+aten": PINK,
    "native_compact+native_event": SKY,
    "native_compact+native_auto": INDIGO,
    "cupy_raw+aten": TEAL,
    "cupy_vectorized+aten": YELLOW,
    "cupy_compact+aten": WINE,
    "cupy_compact+cupy_event": OLIVE,
    "triton_fused+aten": PURPLE,
}
OTHERS = (BLUE, ORANGE, GREEN, RED, PINK, SKY, YELLOW, WINE, INDIGO, TEAL, OLIVE, PURPLE)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


@dataclass(frozen=True)
class Look:
    """How an implementation is drawn."""

    color: str
    marker: str


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each implementation of a report."""
    ordered = sorted(set(names), key=lambda n: (n not in KNOWN, list(KNOWN).index(n) if n in KNOWN else 0, n))
    pools = {}
    for pair in (False, True):
        taken = {KNOWN[n] for n in ordered if n in KNOWN and ("+" in n) is pair}
        pools[pair] = [c for c in OTHERS if c not in taken] or list(OTHERS)
    used = {False: 0, True: 0}
    out = {}
    for index, name in enumerate(ordered):
        color = KNOWN.get(name)
        if color is None:
            pair = "+" in name
            color = pools[pair][used[pair] % len(pools[pair])]
            used[pair] += 1
        out[name] = Look(color, MARKERS[index % len(MARKERS)])
    return out
