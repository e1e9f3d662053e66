"""The ways to have Spikemark: a plain install from a wheel, an editable install, and a checkout with no install at all.

Offline and quick: nothing is downloaded; a bare virtual environment sees the dependencies of the one that runs this.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "harness", "suites", "reports", "commands")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CODE = (".py", ".cpp", ".h", ".cu", ".cuh", ".toml", ".html", ".css", ".js", ".j2")
WHERE = "import spikemark, spikemark.kernels as k; print(*k.__path__); print(spikemark.__version__)"


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    """Standard output of a command that must succeed, without this checkout on any path."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")} | more
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(root: Path = ROOT) -> list[Path]:
    """Every file of the package, relative to its root; the example runs in ``reports/examples`` are none of it."""
    found = [p for room in ROOMS for p in (root / room).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    found = [p for p in found if not p.is_relative_to(root / "reports" / "examples")]
    return [p.relative_to(root) for p in (*found, root / "__init__.py", root / "__main__.py", root / "runner.py")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package alone: building in the real one would leave files behind."""
    copy = tmp_path_factory.mktemp("checkout") / "any-name"
    for path in (*files(), Path("pyproject.toml"), Path("README.md"), Path("py.typed")):
        if (ROOT / path).exists():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path)
    return copy


class Bare:
    """A virtual environment that has the dependencies but not spikemark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        site = Path(
            run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
        )
        # A path in a .pth file is searched for modules, but the .pth files in it are not read: the editable install of
        # the environment that runs the tests stays out.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, *what: str | Path) -> None:
        """``pip install`` into it, offline."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps", "--no-index"]
        run(*pip, "--no-build-isolation", "--disable-pip-version-check", "--ignore-installed", *what, cwd=self.folder)


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    """A fresh one."""
    return Bare(tmp_path / "venv")


def check_commands(env: Bare, cwd: Path, package: Path) -> None:
    """``spikemark`` and ``python -m spikemark`` run this package and no other, and its measuring process starts."""
    assert run(env.python, "-c", WHERE, cwd=cwd).splitlines()[0] == str(package / "kernels")
    script = env.folder / "bin" / "spikemark"
    for command in ([script], [env.python, "-m", "spikemark"]):
        assert run(*command, "--version", cwd=cwd).split() == ["spikemark", PROJECT["project"]["version"]]
    assert len(json.loads(run(script, "list", "workloads", "--json", cwd=cwd))) > 80


VERIFY = ("verify", "--operator", "clamped_sign", "--implementation", "torch", "--workload", "mnist/linear2", "--json")


def test_every_package_and_kind_of_file_is_listed() -> None:
    packages = {".".join(["spikemark", *p.parent.parts]) for p in files() if p.name == "__init__.py"}
    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])
    homeless = [p for p in files() if p.suffix == ".py" and not (ROOT / p.parent / "__init__.py").exists()]
    assert not homeless
    assert {p.suffix for p in files()} <= set(CODE)


def test_a_plain_install(checkout: Path, bare: Bare, tmp_path: Path) -> None:
    """Build the wheel, look into it, install it, run it elsewhere, down to a measuring process."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path,
        checkout, cwd=tmp_path)  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert inside == {f"spikemark/{p.as_posix()}" for p in files(checkout)} | {"spikemark/py.typed"}
    bare.install(wheel)
    site = next((bare.folder / "lib").glob("python*")) / "site-packages"
    check_commands(bare, tmp_path, site / "spikemark")
    records = [json.loads(line) for line in run(bare.folder / "bin" / "spikemark", *VERIFY, cwd=tmp_path).splitlines()]
    assert [(r["phase"], r["status"]) for r in records] == [("forward", "ok"), ("backward", "ok")]


def test_an_editable_install(checkout: Path, bare: Bare, tmp_path: Path) -> None:
    bare.install("-e", checkout)
    check_commands(bare, tmp_path, checkout)


def test_no_install_at_all(checkout: Path, bare: Bare, tmp_path: Path) -> None:
    """``python runner.py`` in a checkout: its own code runs, also in the processes that it starts."""
    with pytest.raises(AssertionError, match="No module named 'spikemark'"):
        run(bare.python, "-c", "import spikemark", cwd=tmp_path)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    out = run(bare.python, "runner.py", *VERIFY, cwd=checkout, TMPDIR=str(temporary))
    assert [json.loads(line)["status"] for line in out.splitlines()] == ["ok", "ok"]
    assert run(bare.python, checkout / "runner.py", "list", "operators", cwd=tmp_path).startswith("Operator")
    assert not [p for p in temporary.iterdir() if p.name.startswith("spikemark-import")], (
        "what it made to be found is gone"
    )
