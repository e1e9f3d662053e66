"""On a node of a cluster: runs the supervisor of that machine as a process of its own, and hands over what it writes.

Torch-free, Ray-free. ``Node`` is what an engine calls there. The process it starts (``python -m
spikemark.harness.engines.node FOLDER``) measures as ``spikemark run`` does, into a run folder in a temporary folder.
Its journal is handed over by position: a call that got lost on the way is made again, and nothing is missed or doubled.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from spikemark.harness import devices
from spikemark.harness import environment as env
from spikemark.harness.engines import parcel
from spikemark.harness.process import LAUNCH, describe_exit, one_line, telling_line
from spikemark.harness.runfolder import JOURNAL, RUN_JSON

PREFIX = "spikemark-node-"
POLL_S, LOOK_S = 1.0, 0.1
PIECE_BYTES = 8 * 2**20
TOLD, OUTCOME, LOG = "told.json", "outcome.json", "log.txt"


class Node:
    """One node's run. ``begin`` once, then ``poll`` until it says that the run has ended."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self._temporary = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-")
        self.folder = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, letter: str, *contents: bytes) -> None:
        """Start measuring what ``letter`` says (see ``parcel``), with the files ``contents``."""
        parcel.store(self.folder, letter, contents)
        with (self.folder / LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid()), "", sys.executable, "-m", __name__,
                 str(self.folder)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_own_environment(), process_group=0,
                cwd=self.folder,
            )  # fmt: skip

    def poll(self, position: int) -> str:
        """News after byte ``position`` of the journal, waiting a moment for some. JSON of:

        ``position`` (of the next call), ``lines`` (of the journal), ``told`` (versions, and the devices' short names),
        ``environments`` and ``lost`` (of ``run.json``), ``ended`` (None while it goes on, then its ``code``,
        ``message`` and ``time``).
        """
        end = time.monotonic() + POLL_S
        while True:
            ended = self._ended()  # first: what was written before it is then certainly read
            lines, after = self._lines(position)
            if lines or ended or time.monotonic() > end:
                break
            time.sleep(LOOK_S)
        said = _json(self.folder / "run" / RUN_JSON)
        news = {"position": after, "lines": lines, "told": _json(self.folder / TOLD), "ended": None if lines else ended}
        return json.dumps(news | {name: said.get(name) or {} for name in ("environments", "lost")})

    def stop(self) -> None:
        """Have it finish its case and end, as Ctrl-C does; a run that has not begun ends at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT if (self.folder / TOLD).exists() else signal.SIGKILL)

    def close(self) -> None:
        """End whatever still runs and leave nothing behind."""
        if self._process is not None:
            self._process.kill()  # its measuring processes go with it
            self._process.wait()
        self._temporary.cleanup()

    def _lines(self, position: int) -> tuple[list[str], int]:
        """Whole lines of the journal from ``position`` on, at most about ``PIECE_BYTES``, and where they end."""
        told = _json(self.folder / TOLD)
        if not told:
            return [], position
        try:
            with (self.folder / "run" / JOURNAL).open("rb") as file:
                file.seek(max(position, told["begin"]))
                begin, data = file.tell(), file.read(PIECE_BYTES)
                if b"\n" not in data and len(data) == PIECE_BYTES:
                    data += file.readline()
        except OSError:
            return [], position
        whole = data[: data.rfind(b"\n") + 1]
        return whole.decode("utf-8").splitlines(), begin + len(whole)

    def _ended(self) -> dict[str, Any] | None:
        if self._process is None or self._process.poll() is None:
            return None
        outcome = _json(self.folder / OUTCOME)
        if outcome:
            return outcome
        text = (self.folder / LOG).read_text(encoding="utf-8", errors="replace")[-(2**14) :]
        how = describe_exit(self._process.returncode)
        return {"code": 2, "message": one_line(": ".join(filter(None, [f"the runner {how}", telling_line(text)])))}


def _sweep(folder: Path) -> None:
    """Remove what nodes that were killed have left there."""
    for path in folder.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)  # another user's is theirs to remove


def _own_environment() -> dict[str, str]:
    """This process's variables as it was started with: an engine may have set a number of threads since, by its own
    idea of a process's share, which a measurement must not inherit."""
    own = dict(os.environ)
    with suppress(OSError):
        first = Path("/proc/self/environ").read_bytes().split(b"\0")
        if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in first):
            own.pop("OMP_NUM_THREADS", None)
    return own


def _json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty while there is none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _write(path: Path, data: dict[str, Any]) -> None:
    """So that a reader sees all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)


def versions() -> dict[str, str]:
    """What should be the same on all nodes: the source of Spikemark, Python, torch."""
    found = env.versions()
    said = {"spikemark": str(found["spikemark"]), "source": str(env.project()["source"])}
    return said | {"python": platform.python_version(), "torch": str(found["torch"])}


def main(folder: Path) -> None:
    """The process: measure what the letter in ``folder`` says, and leave an outcome there."""
    from spikemark.harness.errors import NothingMeasured, UsageError

    # An engine's process may ignore signals, and its threads block them: both are inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        outcome = _measure(folder)
    except KeyboardInterrupt:
        outcome = {"code": 130, "message": "interrupted"}
    except (UsageError, NothingMeasured, OSError, ValueError) as error:
        outcome = {"code": 2, "message": one_line(str(error))}
    _write(folder / OUTCOME, outcome)


def _measure(folder: Path) -> dict[str, Any]:
    """The run itself. A device that has measured a part of it before goes on where it was."""
    from spikemark.harness import runs
    from spikemark.harness.progress import Quiet
    from spikemark.harness.runfolder import RunFolder

    letter, own = parcel.unpack(folder), versions()
    if own["source"] != letter.source:
        _write(folder / TOLD, {"versions": own, "names": {}, "begin": 0})
        return {"code": 2, "message": f"its Spikemark is of another source ({own['source']}, here {letter.source})"}
    machine = devices.here(letter.options.devices)
    shorts = {d: machine.pins[d].hash[:6] if d in machine.pins else letter.node["id"] for d in letter.options.devices}
    options, begin = letter.options, 0
    before = {d: letter.earlier[d][short] for d, short in shorts.items() if short in letter.earlier.get(d, {})}
    if before:
        options, begin = parcel.lay_out(options, before)
    _write(folder / TOLD, {"versions": own, "names": shorts, "begin": begin})
    result = runs.run(letter.cases, options, letter.worker_command, [], Quiet(), machine)
    return {"code": result.exit_code, "message": result.message, "time": RunFolder.load(result.path).meta.get("time")}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
