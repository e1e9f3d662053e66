"""A/B: two versions of the code, ready to be measured side by side in one run. Torch-free.

A version is a git revision, the working tree as it is, or a plug-in file. Each becomes a ``Variant`` of the supervisor.
A revision of Spikemark itself is checked out into a temporary worktree, and its ``kernels`` are put beside the
``harness`` that is running now: both versions are measured with the same ruler, however old one of them is. In any
other repository the versions differ in their plug-in files, which are taken from the checkouts.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spikemark.harness.errors import UsageError
from spikemark.harness.plan import Variant

PACKAGE = Path(__file__).resolve().parent.parent
BASE, NEW = "base", "new"
WORKING_TREE = "working tree"

PASSES = 9
"""Default passes of an A/B run: the 2nd smallest to 2nd largest of nine ratios hold the median at 96 %, so one wild
pass on either side is borne. How that was chosen: docs/ci.md."""
MIN_SAMPLES = 60
"""Samples a case and pass, in turns of a few milliseconds. Single turns vary by 5 to 15 % on a shared machine; a pass
may vary by 3.5 % for 10 % to be found in nine passes."""
PRECISION = 1e-3
"""Sampling must not stop early on one side only; the budget ends it."""
BUDGET_S = 0.1
"""Kernel seconds a case, pass and version."""


@dataclass(frozen=True)
class Version:
    """One side: its ``variant`` for the supervisor, and what ``run.json`` says of it (no paths)."""

    variant: Variant
    about: dict[str, Any]


@contextmanager
def versions(
    base: str, new: str | None = None, plugins: Sequence[str] = (), folder: Path | None = None
) -> Iterator[tuple[Version, Version]]:
    """The two versions, usable until the context ends; then every worktree is removed, after Ctrl-C too.

    ``base`` and ``new`` are git revisions of the repository around ``folder`` (default: where we are); without ``new``
    it is the working tree, uncommitted edits included. Or both are plug-in files. ``plugins`` are plug-in files that
    both versions have; one inside the repository is taken from each version's checkout.
    ``UsageError`` names a revision or file that does not exist.
    """
    here = (folder or Path.cwd()).resolve()
    if base.endswith(".py") or (new or "").endswith(".py"):
        yield _files(base, new, plugins)
        return
    top = _toplevel(here)
    commits = {BASE: _commit(top, base), NEW: _commit(top, new) if new else None}
    spikemark = (top / "kernels" / "catalog.py").is_file() and (top / "runner.py").is_file()
    if not spikemark and not plugins:
        raise UsageError(
            f"{top.name} is not Spikemark's own repository: name the files that hold your implementations with --plugin"
        )
    with ExitStack() as cleanup:
        temporary = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="spikemark-ab-")))
        made = []
        for label, commit in commits.items():
            tree = top if commit is None else cleanup.enter_context(_worktree(top, commit, temporary / f"{label}-tree"))
            root = (str(_package(tree, temporary / label)),) if spikemark else ()
            own = tuple(str(_within(tree, top, here, p)) for p in plugins)
            about = {"ref": {BASE: base, NEW: new}[label] or WORKING_TREE, "commit": commit}
            made.append(Version(Variant(label, root, own), about))
        yield made[0], made[1]


def _files(base: str, new: str | None, plugins: Sequence[str]) -> tuple[Version, Version]:
    """Two plug-in files."""
    if new is None:
        raise UsageError(f"{base} is a plug-in file: name a second one to compare it with")
    made = []
    for label, name in ((BASE, base), (NEW, new)):
        if not Path(name).is_file():
            raise UsageError(f"plug-in {name} is not a file")
        paths = tuple(str(Path(p).resolve()) for p in (*plugins, name))
        made.append(Version(Variant(label, (), paths), {"ref": Path(name).name, "commit": None}))
    return made[0], made[1]


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        raise UsageError("comparing revisions needs git: install it, or compare two plug-in files") from None


def _toplevel(folder: Path) -> Path:
    found = _git(folder, "rev-parse", "--show-toplevel")
    if found.returncode:
        raise UsageError(f"{folder.name} is in no git repository: run this where the code under test is")
    return Path(found.stdout.strip())


def _commit(top: Path, ref: str) -> str:
    found = _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if found.returncode:
        raise UsageError(f"unknown revision {ref!r} (a shallow clone has only the newest: fetch it, or clone in full)")
    return found.stdout.strip()


@contextmanager
def _worktree(top: Path, commit: str, path: Path) -> Iterator[Path]:
    """A checkout of ``commit`` at ``path``, removed again."""
    made = _git(top, "worktree", "add", "--detach", "--quiet", str(path), commit)
    try:
        if made.returncode:
            reason = (made.stderr.strip().splitlines() or ["git gave no reason"])[-1]
            raise UsageError(f"cannot check out {commit[:12]}: {reason}")
        yield path
    finally:
        # Also when git failed half way; `prune` forgets a worktree whose folder has gone.
        shutil.rmtree(path, ignore_errors=True)
        _git(top, "worktree", "prune")


def _package(tree: Path, folder: Path) -> Path:
    """A folder for PYTHONPATH: its package ``spikemark`` has the kernels of ``tree``, the rest is the running one."""
    package = folder / "spikemark"
    package.mkdir(parents=True)
    if not (tree / "kernels" / "__init__.py").is_file():
        raise UsageError("that revision has no kernels/: it is older than what can be compared")
    for entry in PACKAGE.iterdir():
        if entry.name == "__init__.py" or (entry.is_dir() and (entry / "__init__.py").is_file()):
            (package / entry.name).symlink_to(tree / "kernels" if entry.name == "kernels" else entry)
    return folder


def _within(tree: Path, top: Path, here: Path, plugin: str) -> Path:
    """The plug-in of one version: from its checkout if the file lies in the repository, else as it is."""
    path = (here / plugin).resolve()
    if tree != top and path.is_relative_to(top.resolve()):
        path = tree / path.relative_to(top.resolve())
        if not path.is_file():
            raise UsageError(f"plug-in {plugin} does not exist in revision of the checkout {tree.name}")
    if not path.is_file():
        raise UsageError(f"plug-in {plugin} is not a file")
    return path
