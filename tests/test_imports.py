"""The arrows between the rooms, read from the source, and which modules can be had without torch, asked of Python."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "harness", "suites", "reports", "commands", "runner")
# What a room may import of spikemark, beside itself. The root holds only the version.
MAY = {
    "kernels": (),
    "harness": ("kernels",),
    "suites": ("kernels", "harness"),
    "reports": (
        "harness.records",
        "harness.runfolder",
        "harness.statistics",
        "harness.intervals",
        "harness.contrast",
        "harness.changes",
        "harness.merging",
        "harness.parts",
        "harness.results",
        "harness.errors",
        "harness.environment",
        "harness.trace.summary",
    ),
    "commands": ROOMS,
    "runner": ROOMS,
}
TORCH_FREE = (
    "kernels.types",
    "kernels.catalog",
    "kernels.registry",
    "kernels.recording",
    "harness.errors",
    "harness.records",
    "harness.runfolder",
    "harness.statistics",
    "harness.merging",
    "harness.environment",
    "harness.supervisor",
    "harness.engines.node",
    "harness.engines.cluster",
    "harness.trace.driver",
    "harness.trace.chrome",
    "suites.workloads",
    "suites.selection",
    "suites.presets",
)
HEAVY = ("torch", "numpy", "pandas", "matplotlib", "rich", "pytest", "psutil", "jinja2")


def sources(room: str) -> list[Path]:
    return [ROOT / "runner.py"] if room == "runner" else sorted((ROOT / room).rglob("*.py"))


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return f"spikemark.{name.removesuffix('.__init__')}"


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute module, line) of every import in a file, also those inside functions and by ``import_module``."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level] if node.level else [])
            module = ".".join(filter(None, (base, node.module)))
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) and node.args:
            text = ast.unparse(node.args[0]).lstrip("f").strip("'\"")
            if text.startswith("spikemark."):
                yield text, node.lineno


def within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == f"spikemark.{a}" or module.startswith(f"spikemark.{a}.") for a in allowed)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_its_arrows_allow(room: str) -> None:
    files = sources(room)
    assert files
    for path in files:
        for module, line in imported(path):
            where = f"{path.relative_to(ROOT)}:{line} imports {module}"
            root = module.split(".")[0]
            assert root not in (*ROOMS, "tests"), f"{where}: rooms are only known as spikemark.<room>"
            if root == "spikemark" and module not in ("spikemark", "spikemark.__version__"):
                assert within(module, (room, *MAY[room])), f"{where}, but {room} may import {MAY[room] or 'no room'}"
            if room == "reports":
                assert root != "torch", f"{where}: a report is read where there is no torch"


def test_the_check_sees_every_way_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of imports, on a file that uses them all."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "kernels" / "inner" / "some.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import spikemark.harness.clock as c\nfrom spikemark import suites\nfrom . import near\nfrom ..types import T\n"
        "from ... import reports\ndef f():\n    import torch\n    importlib.import_module(f'spikemark.{x}')\n"
    )
    assert [module for module, _ in imported(path)] == [
        "spikemark.harness.clock",
        "spikemark.suites",
        "spikemark.kernels.inner.near",
        "spikemark.kernels.types.T",
        "spikemark.reports",
        "torch",
        "spikemark.{x}",
    ]


def loaded_after(modules: list[str], of: tuple[str, ...]) -> str:
    """Import ``modules`` one by one in a fresh process; the first after which one of ``of`` is loaded, or ''."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = [m for m in {of!r} if m in sys.modules]\n"
        "    if found:\n"
        "        print(name, 'imports', *found)\n"
        "        break\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_planning_supervising_and_reporting_import_no_torch() -> None:
    names = [f"spikemark.{name}" for name in TORCH_FREE]
    names += [module_name(path) for room in ("reports", "commands", "runner") for path in sources(room)]
    assert loaded_after(names, ("torch",)) == ""


def test_ray_is_imported_by_one_module_and_only_when_it_is_asked_for() -> None:
    users = {p for room in ROOMS for p in sources(room) if any(m.split(".")[0] == "ray" for m, _ in imported(p))}
    assert users == {ROOT / "harness" / "engines" / "ray_engine.py"}
    assert loaded_after(["spikemark.harness.engines.cluster"], ("ray",)) == ""


def test_the_command_line_starts_with_nothing_heavy() -> None:
    names = [
        "spikemark",
        "spikemark.runner",
        "spikemark.commands.listing",
        "spikemark.kernels",
        "spikemark.suites.workloads",
    ]
    assert loaded_after(names, HEAVY) == ""


def test_the_check_for_heavy_modules_can_fail() -> None:
    assert loaded_after(["spikemark.kernels.catalog", "spikemark.kernels.state"], ("torch",)) != ""
