"""Where a report may be written: over files, through links, into pipes, and never in the place of a device."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from spikemark.harness.runfolder import StorageError
from spikemark.reports import cli, saving

FORMS = ("html", "markdown", "csv", "parquet", "latex")


@pytest.mark.parametrize("form", FORMS)
def test_a_pipe_gets_the_report_and_stays_a_pipe(form: str, everyday: Path, tmp_path: Path) -> None:
    """``-o >(less)``, ``-o /dev/stdout``: renaming a file over it took ``/dev/full`` from a whole machine."""
    plain, pipe = tmp_path / "plain", tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    cli.report([everyday], output=pipe, form=form)
    reader.join(timeout=30)
    assert pipe.is_fifo() and sorted(p.name for p in tmp_path.iterdir()) == ["pipe"]
    cli.report([everyday], output=plain, form=form)
    assert got == [plain.read_bytes()]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Reached by a link in a folder of the test's own, so that not even a fault could harm the machine."""
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"^cannot write \S+/full: No space left on device$"):
        saving.save(link, "text")
    assert link.is_symlink() and link.is_char_device()


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "old.html", tmp_path / "latest.html"
    target.write_text("old")
    link.symlink_to(target)
    saving.save(link, "new\n")
    assert link.is_symlink() and target.read_bytes() == b"new\n"
    assert [p.name for p in target.parent.iterdir()] == ["old.html"]


def test_a_write_that_fails_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "results.parquet"
    path.write_bytes(b"precious")

    def half(place: Path) -> None:
        place.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        saving.into(path, half)
    assert path.read_bytes() == b"precious" and [p.name for p in tmp_path.iterdir()] == ["results.parquet"]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Is a directory"):
        saving.save(tmp_path, "text")
    assert tmp_path.is_dir() and not tmp_path.with_name(tmp_path.name + ".part").exists()
