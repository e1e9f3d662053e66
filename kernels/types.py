"""Value types shared by every room: neuron parameters, convolution geometry, one sized problem.

Nothing here imports torch, so the command line can list and plan without paying for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


def _require(condition: bool, owner: str, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{owner}: {name} must be {wanted}, got {value!r}")


@dataclass(frozen=True)
class SrmParams:
    """Constants of the spike response model neuron (NeurIPS 2022 "event-driven learning").

    Time constants are in time steps; potentials are dimensionless. ``grad_scale`` is the factor on the
    gradient of a layer's input. Raises ``ValueError`` naming the parameter and its value unless every tau is
    finite and >= 1, ``tau_m != tau_s``, ``v_th`` is finite and > 0 and ``grad_scale`` is finite.
    """

    tau_m: float = 5.0
    tau_s: float = 3.0
    tau_g: float = 2.5
    v_th: float = 1.0
    grad_scale: float = 0.85

    def __post_init__(self) -> None:
        for name in ("tau_m", "tau_s", "tau_g", "v_th", "grad_scale"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            _require(number and math.isfinite(value), "SrmParams", name, value, "a finite number")
        for name in ("tau_m", "tau_s", "tau_g"):
            _require(getattr(self, name) >= 1, "SrmParams", name, getattr(self, name), "at least 1 time step")
        _require(self.tau_m != self.tau_s, "SrmParams", "tau_m", self.tau_m, f"different from tau_s={self.tau_s!r}")
        _require(self.v_th > 0, "SrmParams", "v_th", self.v_th, "greater than 0")

    @property
    def e_m(self) -> float:
        """Decay of the membrane trace per step, ``1 - 1/tau_m``."""
        return 1.0 - 1.0 / self.tau_m

    @property
    def e_s(self) -> float:
        """Decay of the synaptic trace per step, ``1 - 1/tau_s``."""
        return 1.0 - 1.0 / self.tau_s

    @property
    def e_g(self) -> float:
        """Decay of the spike-time gradient trace per step, ``1 - 1/tau_g``."""
        return 1.0 - 1.0 / self.tau_g

    @property
    def gain(self) -> float:
        """``c = tau_m / (tau_m - tau_s)``, the factor of the potential ``c * (m - s)``."""
        return self.tau_m / (self.tau_m - self.tau_s)


def _pair(owner: str, name: str, value: object, minimum: int) -> tuple[int, int]:
    items = value if isinstance(value, (tuple, list)) else (value, value)
    good = len(items) == 2 and all(isinstance(i, int) and not isinstance(i, bool) and i >= minimum for i in items)
    _require(good, owner, name, value, f"an int or a pair of ints >= {minimum}")
    return (int(items[0]), int(items[1]))


@dataclass(frozen=True)
class ConvGeometry:
    """Geometry of a 2-d convolution, as in ``torch.nn.Conv2d``; ints are widened to pairs (height, width).

    Plain Python ints, never tensors: reading a tensor would synchronise the device in every backward.
    Raises ``ValueError`` naming the field.
    """

    stride: Any = (1, 1)
    padding: Any = (0, 0)
    dilation: Any = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("stride", 1), ("padding", 0), ("dilation", 1)):
            object.__setattr__(self, name, _pair("ConvGeometry", name, getattr(self, name), minimum))
        good = isinstance(self.groups, int) and not isinstance(self.groups, bool) and self.groups >= 1
        _require(good, "ConvGeometry", "groups", self.groups, "an int >= 1")

    def output_size(self, size: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
        """Height and width of ``conv2d``'s output for an input of ``size``; may be <= 0 if it does not fit."""
        h, w = (
            (size[i] + 2 * self.padding[i] - self.dilation[i] * (kernel[i] - 1) - 1) // self.stride[i] + 1
            for i in (0, 1)
        )
        return (h, w)


@dataclass(frozen=True)
class Recording:
    """A person's own spike train on disk: a ``.npz`` with the array ``spikes`` (see ``recording.load``)."""

    path: str
    time_axis: int = 1


@dataclass(frozen=True)
class Problem:
    """One sized instance of an operator: everything an input generator and a cost model need.

    ``kind`` is ``conv``, ``linear``, ``pool`` or ``neuron``. ``in_shape`` and ``out_shape`` are feature shapes
    without batch and time, ``[C, H, W]`` or ``[N]``; tensors are ``[batch, time_steps, *shape]``.
    ``kernel`` is the convolution or pooling window. ``spike_rate`` is the rate asked for, 0..1.
    """

    workload: str
    kind: str
    batch: int
    time_steps: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    params: SrmParams = field(default_factory=SrmParams)
    geometry: ConvGeometry = field(default_factory=ConvGeometry)
    kernel: tuple[int, int] | None = None
    spike_rate: float = 0.1
    seed: int = 0
    recording: Recording | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; ``from_json`` is its inverse."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        out["in_shape"], out["out_shape"] = list(self.in_shape), list(self.out_shape)
        out["kernel"] = None if self.kernel is None else list(self.kernel)
        out["params"] = dict(vars(self.params))
        geometry = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self.geometry).items()}
        out["geometry"] = geometry
        out["recording"] = None if self.recording is None else dict(vars(self.recording))
        return out

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """Rebuild a problem from ``to_json``'s dict."""
        data = dict(data)
        data["in_shape"], data["out_shape"] = tuple(data["in_shape"]), tuple(data["out_shape"])
        data["kernel"] = None if data["kernel"] is None else tuple(data["kernel"])
        data["params"] = SrmParams(**data["params"])
        data["geometry"] = ConvGeometry(**data["geometry"])
        data["recording"] = None if data["recording"] is None else Recording(**data["recording"])
        return cls(**data)
