"""The registry of implementations: the decorator, look-up by name, availability with a reason, plug-ins.

Importing this module imports no torch and no implementation. An operator's implementations are imported
when that operator is first asked for: every module in its folder that is not private is imported, so adding
an implementation is one file and one decorator.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from spikemark.kernels.catalog import OPERATORS
from spikemark.kernels.types import Problem

ENTRY_POINT_GROUP = "spikemark.implementations"
NAME = re.compile(r"[A-Za-z0-9_.+-]{1,80}")  # of an implementation: it is typed, and a part of keys and file names
FLOATS = ("float32", "float16", "bfloat16", "float64")


def install_hint(module: str) -> str:
    """What to install for ``module``, chosen by the CUDA that torch is built for (torch need not be imported yet)."""
    if module == "triton":
        return "install triton (Linux): pip install triton"
    if module not in ("cupy", "cudnn"):
        return f"pip install {module}"
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None) or ""
    package = {"cupy": f"cupy-cuda{cuda.split('.')[0]}x", "cudnn": "nvidia-cudnn-frontend"}[module]
    if cuda:
        return f"pip install 'spikemark[cuda{cuda.split('.')[0]}]' or {package} (torch is built for CUDA {cuda})"
    return "install the extra spikemark[cuda12] or spikemark[cuda13], as the CUDA version of your driver"


def gpu_missing() -> str | None:
    """Why torch has no CUDA device, in one line that says what to do; None if it has one."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "no CUDA device: this torch is a build without CUDA; needs an NVIDIA GPU and a CUDA build of torch"
    return (
        f"no CUDA device: torch is built for CUDA {torch.version.cuda}, but finds no NVIDIA GPU with a working driver"
    )


class Implementation:
    """What every registered implementation has beside its operator's methods.

    The decorator fills the class attributes. Subclasses may override ``unavailable`` and ``unsupported``;
    both return one line a person can act on, or None.
    """

    operator: ClassVar[str] = ""
    name: ClassVar[str] = ""
    device: ClassVar[str] = "any"
    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    requires: ClassVar[tuple[str, ...]] = ()
    baseline: ClassVar[bool] = False
    default: ClassVar[bool] = True
    source: ClassVar[str] = "spikemark"
    graph_capture: ClassVar[bool] = False
    """Whether its calls, once warmed up, can be captured in a CUDA graph: they neither synchronise nor compile."""
    ran: str = ""
    """Name of the kernel or path that the last call really took, where there is a choice; results record it."""

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine at all (missing compiler, package, GPU), or None."""
        return None

    def unsupported(self, problem: Problem, phase: str, dtype: str) -> str | None:
        """Why it cannot run this one problem (beyond device and dtype, which are checked already), or None."""
        return None

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int | None:
        """Bytes this design must move through main memory (at least ``Cost.bytes``), or None if not modelled."""
        return None

    @functools.cached_property
    def reason(self) -> str:
        """Why it is unavailable, in one line that says what to do; empty when it is available."""
        # The GPU first: without one, no package helps.
        missing = gpu_missing() if self.device == "cuda" else None
        if missing:
            return missing
        for module in self.requires:
            if importlib.util.find_spec(module) is None:
                return f"Python package {module!r} is not installed: {install_hint(module)}"
        return self.unavailable() or ""

    @property
    def available(self) -> bool:
        """Whether it can run on this machine."""
        return not self.reason

    def runs_on(self, device_type: str) -> bool:
        """Whether it is written for ``device_type`` (``cpu`` or ``cuda``)."""
        return self.device in ("any", device_type)

    @classmethod
    def summary(cls) -> str:
        """First line of the class docstring, without the marks of its mark-up: people read it in a terminal."""
        return (cls.__doc__ or "").strip().split("\n")[0].replace("``", "")


_classes: dict[str, dict[str, type[Any]]] = {name: {} for name in OPERATORS}
_instances: dict[tuple[str, str], Any] = {}
_loaded: set[str] = set()
_derived: dict[str, Callable[[], None]] = {}
_plugin_files: set[str] = set()
_source = "spikemark"


def snake_case(name: str) -> str:
    """``CupyRaw`` -> ``cupy_raw``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def implementation(
    operator: str,
    *,
    name: str | None = None,
    device: str = "any",
    dtypes: tuple[Any, ...] = FLOATS,
    requires: str | tuple[str, ...] = (),
    baseline: bool = False,
    default: bool = True,
) -> Callable[[type[Any]], type[Any]]:
    """Class decorator that registers an implementation of ``operator``.

    ``name`` defaults to the class name in snake_case. ``device`` is ``any``, ``cpu`` or ``cuda``. ``dtypes``
    are torch dtypes or their names. ``requires`` names importable packages. ``baseline`` marks the one
    that speed-ups are against. ``default=False`` keeps it out of runs that do not name it.
    Raises ``ValueError`` for an unknown operator, a bad device, dtype or name, or a name that is taken.
    """
    _known_operator(operator)
    if device not in ("any", "cpu", "cuda"):
        raise ValueError(f"device must be 'any', 'cpu' or 'cuda', got {device!r}")

    types = tuple(str(d).removeprefix("torch.") for d in dtypes)
    if not types or not set(types) <= set(FLOATS):
        raise ValueError(f"dtypes must be some of {', '.join(FLOATS)}, got {', '.join(types) or 'none'}")
    if name is not None and not NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} may hold only letters, digits, '_', '.', '-' and '+', at most 80")

    def register(cls: type[Any]) -> type[Any]:
        bases = (cls,) if issubclass(cls, Implementation) else (cls, Implementation)
        attributes = {
            "operator": operator,
            "name": name or snake_case(cls.__name__),
            "device": device,
            "dtypes": types,
            "requires": (requires,) if isinstance(requires, str) else tuple(requires),
            "baseline": baseline,
            "default": default,
            "source": _source,
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        made: type[Any] = type(cls.__name__, bases, attributes)
        key = str(attributes["name"])
        if key in _classes[operator]:
            other = _classes[operator][key]
            raise ValueError(
                f"{operator} already has an implementation named {key!r} (from {other.source}); "
                "give yours another name: two results must never share one"
            )
        if baseline and any(c.baseline for c in _classes[operator].values()):
            raise ValueError(f"{operator} already has a baseline; {key!r} cannot be a second one")
        _classes[operator][key] = made
        return made

    return register


def closest(word: str, known: list[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest known name, or an empty string."""
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return f" (did you mean {lowered[near[0]]!r}?)" if near else ""


def _known_operator(operator: str) -> None:
    if operator not in OPERATORS:
        known = list(OPERATORS)
        raise ValueError(f"unknown operator {operator!r}{closest(operator, known)}; known: {', '.join(known)}")


def derive(operator: str, register: Callable[[], None]) -> None:
    """Have ``register`` called before every look-up of ``operator``: for implementations made of other operators'
    (the layers' pairs), so that those a plug-in adds later are found too. It must register each of them once."""
    _known_operator(operator)
    _derived[operator] = register


def _load(operator: str) -> None:
    if operator not in _loaded:
        _loaded.add(operator)
        _import(operator)
    if operator in _derived:
        _derived[operator]()


def _import(operator: str) -> None:
    package = importlib.import_module(OPERATORS[operator].package)
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    if "entry points" not in _loaded:
        _loaded.add("entry points")
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            _with_source(f"entry point {entry.name}", entry.load)


def _with_source(source: str, action: Callable[[], Any]) -> None:
    global _source
    before, _source = _source, source
    try:
        action()
    finally:
        _source = before


def load_plugin(path: str | Path) -> None:
    """Import a Python file that registers implementations (``--plugin FILE``); twice is once.

    Raises ``ValueError`` naming the file if it is missing, if importing it fails, or if it registers nothing.
    """
    file = Path(path).resolve()
    if str(file) in _plugin_files:
        return
    if not file.is_file():
        raise ValueError(f"plug-in {path} is not a file")
    for operator in OPERATORS:
        _load(operator)
    module_name = f"spikemark_plugin_{file.stem}_{len(_plugin_files)}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"plug-in {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    loader = spec.loader
    before = sum(map(len, _classes.values()))
    try:
        _with_source(f"plug-in {file.name}", lambda: loader.exec_module(module))
    except (Exception, SystemExit) as error:
        raise ValueError(f"plug-in {path} failed to import: {type(error).__name__}: {error}") from error
    if sum(map(len, _classes.values())) == before:
        raise ValueError(f"plug-in {path} registers no implementation: put @implementation(OPERATOR) before a class")
    _plugin_files.add(str(file))


def get(operator: str, name: str) -> Any:
    """The implementation ``name`` of ``operator``; ``KeyError`` names the known ones.

    One shared instance a name: implementations keep no state between calls beyond compiled code.
    """
    try:
        _known_operator(operator)
    except ValueError as error:
        raise KeyError(str(error)) from None
    _load(operator)
    if name not in _classes[operator]:
        known = list(_classes[operator])
        raise KeyError(
            f"unknown implementation {name!r} of {operator}{closest(name, known)}; known: {', '.join(known)}"
        )
    key = (operator, name)
    if key not in _instances:
        _instances[key] = _classes[operator][name]()
    return _instances[key]


def implementations(operator: str, device: str | None = None) -> list[Any]:
    """All registered implementations of ``operator``, baseline first, optionally only those for a device type.

    Unavailable ones are included: they have ``.available == False`` and a ``.reason``.
    """
    _known_operator(operator)
    _load(operator)
    found = [get(operator, name) for name in _classes[operator]]
    if device is not None:
        found = [i for i in found if i.runs_on(device.split(":")[0])]
    return sorted(found, key=lambda i: not i.baseline)


def baseline(operator: str) -> Any:
    """The implementation that speed-ups of ``operator`` are against."""
    return next(i for i in implementations(operator) if i.baseline)
