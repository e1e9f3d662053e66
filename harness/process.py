"""One measuring process: started, listened to, watched and killed. Knows nothing of passes or journals.

Torch-free. A worker may do whatever a kernel under development does: die, hang, print binary, write rubbish to its
event channel, leave children behind. Nothing here blocks on it, and ``stop`` always ends the whole process group.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

WorkerCommand = Callable[[Path, int], list[str]]
"""``worker_command(plan_path, events_fd)``: the command line of a process that measures what the plan says."""

STOP_LIMIT_S = 20.0
LOG_LIMIT_BYTES = 16 * 2**20
EVENT_LIMIT_BYTES = 512 * 2**20
_FAULT = re.compile(r"(?:Fatal Python error|terminate called|what\(\):).*")  # wherever in its line: dots may precede
LAUNCH = Path(__file__).with_name("launch.py")


class Worker:
    """A running measuring process. ``poll`` returns the events that have arrived; ``closed`` says that no more will."""

    def __init__(self, command: WorkerCommand, plan: Path, log: Path, env: dict[str, str], cpus: str = "") -> None:
        """``cpus``: those the process is kept on, ``0,1,8``; empty: those of this one."""
        self.log = log
        self.stuck = False
        self.garbage = 0
        self._buffer = bytearray()
        self._eof = False
        self._marked = 0
        self._read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        os.set_inheritable(write_fd, True)
        prefix = [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid()), cpus]
        try:
            with log.open("ab", buffering=0) as out:
                self.process = subprocess.Popen(
                    [*prefix, *command(plan, write_fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write_fd,),
                    process_group=0,
                    env=env,
                )
        except BaseException:
            os.close(self._read_fd)
            raise
        finally:
            os.close(write_fd)
        self._ended = _exit_descriptor(self.process.pid)

    @property
    def closed(self) -> bool:
        """Whether the process has ended or hung up, and everything it said has been returned by ``poll``."""
        return self._eof

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """Events that arrived, waiting up to ``timeout_s`` for the first. Lines that are no event are counted."""
        if self._eof:
            return []
        watched = [self._read_fd] + ([self._ended] if self._ended is not None else [])
        select.select(watched, [], [], timeout_s)
        # Ask for the end before reading: what was written before it is then certainly in the pipe. A child that the
        # kernel left behind may hold the pipe open for ever, so its end of file alone is not waited for.
        ended = self.process.poll() is not None
        while True:
            try:
                data = os.read(self._read_fd, 1 << 20)
            except BlockingIOError:
                self._eof = ended
                break
            if not data:
                self._eof = True
                break
            self._buffer += data
        return self._lines()

    def _lines(self) -> list[dict[str, Any]]:
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest if len(rest) < EVENT_LIMIT_BYTES else bytearray()
        events = []
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
            elif line.strip():
                self.garbage += 1
        return events

    def rss_bytes(self) -> int:
        """Memory of the process now; 0 if it has ended."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def mark(self, position: int) -> None:
        """What the log holds before ``position`` (the worker's own ``log_position``) was another case's."""
        self._marked = max(0, position)

    def limit_log(self) -> None:
        """Empty the log if the worker prints without end: it must not fill the disk."""
        if self._log_size() > LOG_LIMIT_BYTES:
            os.truncate(self.log, 0)
            self._marked = 0
            with self.log.open("ab") as file:
                file.write(b"[log emptied: it had grown beyond 16 MiB]\n")

    def _log_size(self) -> int:
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    def last_words(self) -> str:
        """The most telling printable end of what was printed since ``mark``, in one line; empty if there is none."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._marked, self._log_size() - 2**14))
                text = file.read(2**14).decode("utf-8", "replace")
        except OSError:
            return ""
        return telling_line(text)

    def stop(self) -> None:
        """Kill the process and everything in its group, and children that left the group; wait for the process.

        ``stuck`` says that it did not end: a process inside the driver of a GPU that is gone may never do.
        """
        for child in _children(self.process.pid):
            _kill(child.kill)
        # The group's number stays taken while any member lives, even after the leader was waited for.
        _kill(lambda: os.killpg(self.process.pid, signal.SIGKILL))
        self.stuck = not self.wait(0.0 if self.stuck else STOP_LIMIT_S)

    def close(self) -> None:
        """Stop whatever still runs and release the descriptors; more than once is once."""
        if self._read_fd >= 0:
            self.stop()
            os.close(self._read_fd)
            if self._ended is not None:
                os.close(self._ended)
            self._read_fd = -1

    def wait(self, timeout_s: float) -> bool:
        """Let the process end by itself; whether it did in time."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def log_position() -> int:
    """In a worker: how much has been written to its log, for ``Worker.mark``; 0 where that is no file.

    Only the worker knows this in time: when the runner reads that a case has begun, it may be over.
    """
    try:
        return os.fstat(2).st_size
    except OSError:  # a kernel under development may have closed it
        return 0


def _exit_descriptor(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends (Linux 5.3), or None: then ``poll`` looks in turns."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _kill(action: Callable[[], object]) -> None:
    try:
        action()
    except (ProcessLookupError, PermissionError, psutil.Error):
        return


def one_line(text: str, limit: int = 300) -> str:
    """``text`` on one line, safe to show: no control characters, absolute folders cut off, at most ``limit`` long."""
    text = "".join(c if c.isprintable() else " " for c in text)
    text = re.sub(r"(?<![\w.~-])~?/(?:[^\s/:\"'<>|]+/)+", "", " ".join(text.split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def telling_line(text: str) -> str:
    """Of a process's last output: the line that names the fault, else the last few lines, if they are readable."""
    faults = [found.group() for found in _FAULT.finditer(text) if _readable(found.group())]
    if faults:
        return one_line("; ".join(faults[-2:]))
    # A line without a word is a test runner's row of dots.
    lines = [line for line in text.splitlines() if re.search(r"[^\W\d_]{3}", line) and _readable(line)]
    return one_line("; ".join(lines[-3:]))


def _readable(line: str) -> bool:
    printable = sum(c.isprintable() or c == "\t" for c in line)
    return "\N{REPLACEMENT CHARACTER}" not in line and printable > 0.9 * len(line)


def describe_exit(code: int) -> str:
    """``killed by SIGSEGV (Segmentation fault)`` or ``ended itself with exit code 3``."""
    if code >= 0:
        return f"ended itself with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name} ({signal.strsignal(-code)})"
    except ValueError:
        return f"killed by signal {-code}"


def available_memory_bytes() -> int:
    """Memory that can still be used before something is killed: the machine's, or the container's if that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (Path(f).read_text(encoding="ascii").strip() for f in (limit_file, used_file))
        except OSError:
            continue
        if limit.isdigit():
            available = min(available, max(0, int(limit) - int(used)))
    return available


def oom_kills() -> int:
    """How often the system has killed for memory since it started (Linux); 0 where it does not tell."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found.group(1)) if found else 0
