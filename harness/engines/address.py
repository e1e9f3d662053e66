"""Whether a Ray cluster answers at an address: asked in a child process, before this one joins it."""

from __future__ import annotations

import socket
import subprocess
import sys

from spikemark.harness.errors import UsageError

ANSWER_S, CHECK_S = 5.0, 60.0


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def connects(address: str) -> str:
    """Why nobody takes a connection at HOST:PORT; empty if somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def answers(address: str) -> None:
    """Refuse what does not answer as a cluster: joining it would take minutes, and may end this process."""
    if "://" in address:
        raise UsageError(f"--address {address!r}: Ray's client is not enough; on a node of the cluster, name HOST:PORT")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--address {address!r} is no HOST:PORT, such as 10.0.0.1:6379")
    if why := connects(address):
        raise UsageError(f"nobody answers at {address}: {why}")
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        healthy = subprocess.run(command, capture_output=True, timeout=CHECK_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        healthy = False
    if not healthy:
        raise UsageError(f"what answers at {address} is no Ray cluster, or one of another version of Ray or Python")
