"""Two versions of the code: worktrees that go away, and packages that really win over the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from spikemark.harness import ab
from spikemark.harness.errors import UsageError
from spikemark.harness.plan import Variant, worker_env

HERE = Path(ab.__file__).resolve().parent.parent


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *names, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def spikemark_like(tmp_path: Path) -> Path:
    """A repository with Spikemark's shape whose kernels say which revision they are."""
    top = tmp_path / "repository"
    (top / "kernels").mkdir(parents=True)
    (top / "runner.py").write_text("")
    (top / "kernels" / "catalog.py").write_text("")
    git(top, "init", "-q")
    for text in ("one", "two"):
        (top / "kernels" / "__init__.py").write_text(f"WHO = {text!r}\n")
        git(top, "add", "-A")
        git(top, "commit", "-q", "-m", text)
    (top / "kernels" / "__init__.py").write_text("WHO = 'not committed'\n")
    return top


def imported(variant: Variant, code: str) -> str:
    """What a measuring process of this variant prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=worker_env("cpu", variant), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


WHO = "import spikemark.kernels as k, spikemark.harness.turns as t, os; print(k.WHO, os.path.realpath(t.__file__))"


def test_each_version_imports_its_own_kernels_and_the_running_harness(spikemark_like: Path) -> None:
    turns = os.path.realpath(HERE / "harness" / "turns.py")
    with ab.versions("HEAD~1", "HEAD", folder=spikemark_like) as (base, new):
        assert imported(base.variant, WHO) == f"one {turns}"
        assert imported(new.variant, WHO) == f"two {turns}"
        assert base.about == {"ref": "HEAD~1", "commit": git(spikemark_like, "rev-parse", "HEAD~1")}
    with ab.versions("HEAD", folder=spikemark_like) as (base, new):
        assert imported(base.variant, WHO) == f"two {turns}"
        assert imported(new.variant, WHO) == f"not committed {turns}"
        assert new.about == {"ref": "working tree", "commit": None}


def test_worktrees_are_gone_afterwards_whatever_happens(spikemark_like: Path) -> None:
    roots: list[str] = []
    for error in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(error), ab.versions("HEAD~1", "HEAD", folder=spikemark_like) as both:
            roots += [folder for version in both for folder in version.variant.pythonpath]
            assert git(spikemark_like, "worktree", "list").count("\n") == 2
            raise error
    assert git(spikemark_like, "worktree", "list").count("\n") == 0
    assert len(roots) == 4
    assert not any(Path(root).exists() for root in roots)
    assert (spikemark_like / "kernels" / "__init__.py").read_text() == "WHO = 'not committed'\n"


def test_plugin_of_another_repository_comes_from_each_checkout(tmp_path: Path) -> None:
    top = tmp_path / "mine"
    (top / "src").mkdir(parents=True)
    git(top, "init", "-q")
    file = top / "src" / "mine.py"
    for text in ("old", "new"):
        file.write_text(text)
        git(top, "add", "-A")
        git(top, "commit", "-q", "-m", text)
    elsewhere = tmp_path / "other.py"
    elsewhere.write_text("other")
    plugins = ["mine.py", str(elsewhere)]
    with ab.versions("HEAD~1", None, plugins, folder=top / "src") as (base, new):
        assert [Path(p).read_text() for p in base.variant.plugins] == ["old", "other"]
        assert [Path(p).read_text() for p in new.variant.plugins] == ["new", "other"]
        assert base.variant.pythonpath == ()


def test_two_plugin_files(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("")
    with ab.versions(str(tmp_path / "a.py"), str(tmp_path / "b.py")) as (base, new):
        assert [Path(p).name for v in (base, new) for p in v.variant.plugins] == ["a.py", "b.py"]
        assert (base.variant.label, new.variant.label) == ("base", "new")


def test_bad_input_is_one_line_that_names_it(
    spikemark_like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def refused(*arguments: object, **named: object) -> str:
        with pytest.raises(UsageError) as caught, ab.versions(*arguments, **named):  # type: ignore[arg-type]
            pass
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "'nowhere'" in refused("nowhere", folder=spikemark_like)
    assert "'--help'" in refused("--help", folder=spikemark_like)
    assert "in no git repository" in refused("HEAD", folder=tmp_path)
    assert "second one" in refused("a.py")
    assert "a.py is not a file" in refused("a.py", "b.py")
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    assert "--plugin" in refused("HEAD", folder=tmp_path)
    assert "new.py" in refused("HEAD", None, ["new.py"], folder=tmp_path)
    git(spikemark_like, "rm", "-rq", "--cached", "kernels")
    git(spikemark_like, "commit", "-q", "-m", "no kernels")
    assert "no kernels/" in refused("HEAD", folder=spikemark_like)
    assert git(spikemark_like, "worktree", "list").count("\n") == 0
