"""Two measuring processes that take turns, so that what is compared is measured within milliseconds of each other.

Torch-free. On a shared machine the speed of a kernel jumps by tens of percent from one second to the next, for all
processes alike. Two variants measured a second apart are compared under different machines; measured in turns of a few
milliseconds, both see every jump. (docs/ci.md has the figures.)

The runner's side is ``Turnstile``: a local socket and a thread. The worker's side is ``Turn``: ``pause(case, burst)``
says "I have reached this point" and returns when the other has reached it too or is gone. Exactly one of the two
runs at any time: while one samples, the other is blocked in a read, burning nothing. Who goes first at a point is
drawn anew each time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import selectors
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from spikemark.harness.errors import UsageError

VARIABLE = "SPIKEMARK_TURNS"
LABEL_VARIABLE = "SPIKEMARK_TURNS_LABEL"
BURST_NS = 5_000_000
"""Nanoseconds (flushing included) after which a worker hands over, after one sample at least: long beside a hand-over
(about 0.1 ms), short beside the machine's changes of mood."""

Point = tuple[int, int]


class Turn:
    """A worker's side. Without ``SPIKEMARK_TURNS`` in the environment, ``pause`` returns at once."""

    def __init__(self, path: str | None = None, label: str = "") -> None:
        self._socket: socket.socket | None = None
        if path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(path)
            self._socket.sendall(json.dumps({"label": label}).encode() + b"\n")

    @property
    def shared(self) -> bool:
        """Whether there is another to take turns with."""
        return self._socket is not None

    def pause(self, key: str, burst: int = 0) -> None:
        """Let the other variant catch up to burst ``burst`` of the case ``key``; 0 is before the case starts.

        An unknown key (the empty one) lies before all cases. If the runner's side has gone away, there is nobody to
        wait for and this returns at once from then on.
        """
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps({"key": key, "burst": burst}).encode() + b"\n")
            answer = self._socket.recv(1)
        except OSError:
            answer = b""
        if not answer:
            self._socket.close()
            self._socket = None


@functools.cache
def mine() -> Turn:
    """This process's turn, from its environment."""
    return Turn(os.environ.get(VARIABLE), os.environ.get(LABEL_VARIABLE, ""))


class _Lane:
    """What the turnstile knows of one variant: where it is, and whether it waits there."""

    def __init__(self) -> None:
        self.connection: socket.socket | None = None
        self.buffer = b""
        self.point: Point = (-1, 0)
        self.waiting = False
        self.expected = True


class Turnstile:
    """Lets the variants ``labels`` through ``keys`` (one pass's cases in visit order) side by side.

    A context manager. ``environment(label)`` is what a worker needs in its environment. A variant whose process has
    died is not waited for, until its successor connects; one that has not connected yet is.
    """

    def __init__(self, folder: Path, labels: Sequence[str], keys: Sequence[str], seed: str) -> None:
        self._position = {key: i for i, key in enumerate(keys)}
        self._lanes = {label: _Lane() for label in labels}
        self._random = random.Random(seed)
        self._guard = threading.Lock()
        self._closing = False
        self.path = folder / f"turns-{len(list(folder.glob('turns-*')))}"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._server.bind(str(self.path))
        except OSError as error:  # a socket's name may have about 100 characters
            raise UsageError(
                f"cannot make a socket in the temporary folder: {error}; set TMPDIR to a short one"
            ) from None
        self._server.listen(len(labels))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="spikemark-turns", daemon=True)

    def __enter__(self) -> Turnstile:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wake.close()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def environment(self, label: str) -> dict[str, str]:
        """Variables for the worker of ``label``."""
        return {VARIABLE: str(self.path), LABEL_VARIABLE: label}

    def leave(self, label: str) -> None:
        """``label`` has no more to measure in this pass: the others need not wait for it."""
        with self._guard:
            self._lanes[label].expected = False
            self._grant()

    def finish_cases(self) -> None:
        """Start no more cases; those under way are measured to their end, alone if the other has not begun them."""
        with self._guard:
            self._closing = True
            self._grant()

    def waiting(self, label: str) -> bool:
        """Whether ``label`` waits for its turn now: that time is not its own."""
        with self._guard:
            return self._lanes[label].waiting

    def _serve(self) -> None:
        unnamed: dict[socket.socket, bytes] = {}
        while True:
            for key, _ in self._selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._woken:
                    self._close(unnamed)
                    return
                if source is self._server:
                    connection, _ = self._server.accept()
                    unnamed[connection] = b""
                    self._selector.register(connection, selectors.EVENT_READ, None)
                    continue
                try:
                    data = source.recv(4096)
                except OSError:
                    data = b""
                with self._guard:
                    self._hear(source, data, unnamed)
                    self._grant()

    def _hear(self, source: socket.socket, data: bytes, unnamed: dict[socket.socket, bytes]) -> None:
        lane = next((one for one in self._lanes.values() if one.connection is source), None)
        if not data:
            self._selector.unregister(source)
            source.close()
            unnamed.pop(source, None)
            if lane is not None:
                lane.connection, lane.waiting, lane.expected = None, False, False
            return
        buffer = (unnamed.get(source, b"") if lane is None else lane.buffer) + data
        *lines, rest = buffer.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # a line that is none: ignored
                said = json.loads(line)
                if "label" in said:
                    lane = self._lanes[said["label"]]
                    lane.connection, lane.waiting, lane.expected = source, False, True
                    unnamed.pop(source, None)
                elif lane is not None:
                    lane.point = (self._position.get(said["key"], -1), int(said["burst"]))
                    lane.waiting = True
        if lane is None:
            unnamed[source] = rest
        else:
            lane.buffer = rest

    def _grant(self) -> None:
        """Let one go, if nobody runs: of those furthest behind, one at random."""
        present = [lane for lane in self._lanes.values() if lane.connection is not None or lane.expected]
        if self._closing:
            present = [lane for lane in present if not (lane.waiting and lane.point[1] == 0)]
        if not present or not all(lane.waiting for lane in present):
            return
        first = min(lane.point for lane in present)
        chosen = self._random.choice([lane for lane in present if lane.point == first])
        chosen.waiting = False
        assert chosen.connection is not None
        with contextlib.suppress(OSError):  # it died: its end of file is the next thing heard
            chosen.connection.sendall(b".")

    def _close(self, unnamed: dict[socket.socket, bytes]) -> None:
        for connection in [*unnamed, *(lane.connection for lane in self._lanes.values() if lane.connection)]:
            connection.close()
        self._server.close()
        self._woken.close()
        self._selector.close()
