"""Named workloads: layers of published networks and a person's own recordings, as sized problems.

The layers are data (``workloads.toml``, and files of the same form by ``--workload-file``). Torch-free.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from spikemark.harness.errors import UsageError
from spikemark.kernels.catalog import OPERATORS
from spikemark.kernels.types import ConvGeometry, Problem, Recording, SrmParams

BUILT_IN = Path(__file__).with_name("workloads.toml")
RECORDING_OPERATORS = ("conv_backward", "srm_conv2d", "adjusted_avg_pool2d")
RECORDING_KERNEL = (3, 3)  # a convolution that keeps channels and size, as most layers of the networks do
RECORDING_POOL = (2, 2)
NAME_LIMIT = 64  # characters: names become parts of file names
COUNT_LIMIT = 10**9  # of one size; what is larger is a slip of the finger, and overflows further on
BYTES_LIMIT = 2**20  # of a workload file: thousands of layers
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Workload:
    """One named layer: ``network/layer``, or ``recording:file/layer`` for spikes that a person brought.

    Shapes are feature shapes without batch and time. ``batch`` and ``spike_rate`` (0..1) are the published ones;
    for a recording they are what the file holds and cannot be asked for otherwise. ``source`` names the layer
    whose output is this one's input ("input" for the network's own).
    """

    name: str
    kind: str
    batch: int
    time_steps: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    spike_rate: float
    params: SrmParams = field(default_factory=SrmParams)
    geometry: ConvGeometry = field(default_factory=ConvGeometry)
    kernel: tuple[int, int] | None = None
    source: str = "input"
    about: str = ""
    recording: Recording | None = None

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that can be measured on it. A recording holds a layer's input spikes, no neuron's current."""
        found = tuple(op.name for op in OPERATORS.values() if self.kind in op.kinds)
        return found if self.recording is None else tuple(o for o in found if o in RECORDING_OPERATORS)

    @property
    def summary(self) -> str:
        """The layer in one line, as ``128>256 k3/1/1 @16x16``: channels, kernel/stride/padding, input size."""
        if self.kind == "neuron":
            return f"{self.out_shape[0]} neurons"
        ends = f"{self.in_shape[0]}>{self.out_shape[0]}"
        if self.kernel is None:
            return f"linear {ends}"
        size = f"@{self.in_shape[1]}x{self.in_shape[2]}"
        if self.kind == "pool":
            return f"pool {_short(self.kernel)} of {self.in_shape[0]} {size}"
        g = self.geometry
        return f"{ends} k{_short(self.kernel)}/{_short(g.stride)}/{_short(g.padding)} {size}"

    def problem(self, batch: int | None = None, spike_rate: float | None = None, seed: int = 0) -> Problem:
        """The workload at a batch size and firing rate (default: its own). A recording keeps its own of both."""
        own = self.recording is not None
        return Problem(
            workload=self.name,
            kind=self.kind,
            batch=self.batch if own or batch is None else batch,
            time_steps=self.time_steps,
            in_shape=self.in_shape,
            out_shape=self.out_shape,
            params=self.params,
            geometry=self.geometry,
            kernel=self.kernel,
            spike_rate=self.spike_rate if own or spike_rate is None else spike_rate,
            seed=seed,
            recording=self.recording,
        )


def _short(pair: tuple[int, int]) -> str:
    return f"{pair[0]}" if pair[0] == pair[1] else f"{pair[0]}x{pair[1]}"


@functools.cache
def built_in() -> dict[str, Workload]:
    """The workloads that come with Spikemark, by name, in the order of the file."""
    return load(BUILT_IN)


def load(path: str | Path) -> dict[str, Workload]:
    """Workloads of a TOML file of the form of ``workloads.toml``. ``UsageError`` names the file and the entry."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(BYTES_LIMIT + 1)
        if len(text) > BYTES_LIMIT:
            raise UsageError(f"workload file {path} has more than {BYTES_LIMIT} bytes: it is no list of layers")
        data = tomllib.loads(text.decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"workload file {path}: {error.strerror or error}") from None
    except RecursionError:
        raise UsageError(f"workload file {path} is nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"workload file {path} is not valid TOML: {error}") from None
    found: dict[str, Workload] = {}
    for network, table in data.items():
        layers = table.get("layers") if isinstance(table, dict) else None
        if not isinstance(layers, list) or not layers:
            raise UsageError(f"workload file {path}: network {network!r} needs a list `layers`")
        earlier: list[str] = []
        for position, entry in enumerate(layers, 1):
            label = entry.get("name", f"layer {position}") if isinstance(entry, dict) else f"layer {position}"
            try:
                workload = _parse(network, table, entry, earlier)
                if workload.name in found:
                    raise ValueError("the name is used twice")
            except (KeyError, TypeError, ValueError) as error:
                what = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else str(error)
                raise UsageError(f"workload file {path}: {network}/{label}: {what}") from None
            found[workload.name] = workload
            earlier.append(label)
    if not found:
        raise UsageError(f"workload file {path} holds no network")
    return found


_NETWORK_FIELDS = {"about", "layers"}
_SHARED_FIELDS = {"time_steps", "batch", "spike_rate", "neuron_params"}
_KIND_FIELDS = {
    "conv": {"size", "kernel", "stride", "padding", "dilation", "groups"},
    "pool": {"size", "kernel"},
    "linear": set(),
    "neuron": set(),
}


def _parse(network: str, table: dict[str, Any], entry: Any, earlier: Sequence[str]) -> Workload:
    """One layer, after the layers named ``earlier``; ``ValueError``, ``TypeError``, ``KeyError`` say what is wrong."""
    if not isinstance(entry, dict):
        raise ValueError('a layer must be a table such as { name = "conv1", conv = [3, 128], size = 32, kernel = 3 }')
    kinds = [kind for kind in _KIND_FIELDS if kind in entry]
    if len(kinds) != 1:
        raise ValueError(f"needs exactly one of {', '.join(_KIND_FIELDS)}")
    kind = kinds[0]
    known = {"name", "from", kind} | _SHARED_FIELDS | _KIND_FIELDS[kind]
    if strange := sorted((set(entry) - known) | (set(table) - _NETWORK_FIELDS - _SHARED_FIELDS)):
        raise ValueError(f"unknown field {strange[0]!r}")
    both = {**table, **entry}
    for part in (network, entry["name"]):
        if not isinstance(part, str) or not NAME.fullmatch(part):
            raise ValueError(f"the name {part!r} may hold only letters, digits, '.', '_' and '-'")
        if len(part) > NAME_LIMIT:
            raise ValueError(f"the name has {len(part)} characters; at most {NAME_LIMIT} are allowed")
    rate = both["spike_rate"]
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 0 <= rate <= 1:
        raise ValueError(f"`spike_rate` must be a number from 0 to 1, got {rate!r}")
    params = both.get("neuron_params", {})
    if not isinstance(params, dict):
        raise ValueError("`neuron_params` must be a table such as { tau_m = 5, tau_s = 3, tau_g = 2.5, v_th = 1 }")
    if strange := sorted(set(params) - {f.name for f in fields(SrmParams)}):
        raise ValueError(f"unknown field {strange[0]!r} of `neuron_params`")
    source = entry.get("from", earlier[-1] if earlier else "input")
    if source != "input" and source not in earlier:
        raise ValueError(f'`from` must be "input" or an earlier layer of the network, got {source!r}')
    shared: dict[str, Any] = {
        "name": f"{network}/{entry['name']}",
        "kind": kind,
        "batch": _count("batch", both["batch"]),
        "time_steps": _count("time_steps", both["time_steps"]),
        "spike_rate": float(rate),
        "params": SrmParams(**params),
        "source": source,
        "about": str(table.get("about", "")),
    }
    return Workload(**shared, **_shapes(kind, entry))


def _shapes(kind: str, entry: dict[str, Any]) -> dict[str, Any]:
    if kind == "neuron":
        neurons = _count("neuron", entry["neuron"])
        return {"in_shape": (neurons,), "out_shape": (neurons,)}
    if kind == "linear":
        ends = _counts("linear", entry["linear"])
        return {"in_shape": ends[:1], "out_shape": ends[1:]}
    size, kernel = _counts("size", entry["size"]), _counts("kernel", entry["kernel"])
    if kind == "pool":
        channels = _count("pool", entry["pool"])
        ends, geometry = (channels, channels), ConvGeometry(stride=kernel)
    else:
        ends = _counts("conv", entry["conv"])
        geometry = ConvGeometry(**{k: entry[k] for k in ("stride", "padding", "dilation", "groups") if k in entry})
        if ends[0] % geometry.groups or ends[1] % geometry.groups:
            raise ValueError(f"`groups` = {geometry.groups} does not divide the channels {ends[0]} and {ends[1]}")
    out = geometry.output_size(size, kernel)
    if min(out) < 1:
        raise ValueError(f"a kernel of {_short(kernel)} does not fit an input of {size[0]}x{size[1]}")
    shapes = {"in_shape": (ends[0], *size), "out_shape": (ends[1], *out), "kernel": kernel}
    return shapes | ({} if kind == "pool" else {"geometry": geometry})


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= COUNT_LIMIT:
        raise ValueError(f"`{name}` must be an integer from 1 to {COUNT_LIMIT}, got {value!r}")
    return value


def _counts(name: str, value: Any) -> tuple[int, int]:
    """A pair of counts; one number stands for both, except for channels and features (`conv`, `linear`)."""
    items = [value, value] if isinstance(value, int) and name not in ("conv", "linear") else value
    if not isinstance(items, list) or len(items) != 2:
        raise ValueError(f"`{name}` must be two integers, got {value!r}")
    return _count(name, items[0]), _count(name, items[1])


def catalog(
    files: Sequence[str] = (), recordings: Sequence[tuple[str, int | None]] = ()
) -> tuple[dict[str, Workload], list[str]]:
    """All workloads by name, built-in ones first, and the names of those that a person brought.

    ``recordings`` are pairs of path and time axis. ``UsageError`` as ``load`` and ``from_recording``, or for a name
    that is taken.
    """
    found = dict(built_in())
    own: list[str] = []
    brought = [(file, list(load(file).values())) for file in files]
    brought += [(path, from_recording(path, time_axis)) for path, time_axis in recordings]
    for path, layers in brought:
        for workload in layers:
            if workload.name in found:
                raise UsageError(f"{path}: there is already a workload {workload.name!r}; rename one of the two")
            found[workload.name] = workload
            own.append(workload.name)
    return found, own


def from_recording(path: str | Path, time_axis: int | None = None) -> list[Workload]:
    """Layers that take a recording as their input: a convolution (C>C k3/1/1) and, if it fits, a 2x2 pool.

    The file is read and checked; ``UsageError`` names it and its fault. Names hold the file's stem only: no folder
    of the person's machine gets into results, and every character that is not plain is replaced by ``_``.
    """
    from spikemark.kernels import recording as reader

    try:
        spikes = reader.read(path, time_axis)
    except ValueError as error:
        raise UsageError(str(error)) from None
    batch, time_steps, *shape = spikes.shape
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(path).stem)[:NAME_LIMIT] or "_"
    shared: dict[str, Any] = {
        "batch": batch,
        "time_steps": time_steps,
        "in_shape": tuple(shape),
        "spike_rate": float(spikes.mean()),
        "about": "your own recording",
        "recording": Recording(str(path), reader.TIME_AXIS if time_axis is None else time_axis),
    }
    same = ConvGeometry(padding=1)
    layers = [
        Workload(
            f"recording:{stem}/conv", "conv", out_shape=tuple(shape), geometry=same, kernel=RECORDING_KERNEL, **shared
        )
    ]
    out = ConvGeometry(stride=RECORDING_POOL).output_size((shape[1], shape[2]), RECORDING_POOL)
    if min(out) >= 1:
        layers.append(
            Workload(f"recording:{stem}/pool", "pool", out_shape=(shape[0], *out), kernel=RECORDING_POOL, **shared)
        )
    return layers
