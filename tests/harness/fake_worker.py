"""A measuring process without torch: it speaks the worker protocol, and each implementation's name says what it does.

``python fake_worker.py PLAN EVENTS_FD``. FAKE_* environment variables change the environment it reports.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import json
import os
import signal
import sys
import termios
import time
from pathlib import Path
from typing import Any

from spikemark.harness.devices import cuda_index
from spikemark.harness.gpu import uuid_hash
from spikemark.harness.process import log_position
from spikemark.harness.records import Case, Record

EVENTS_FD = int(sys.argv[2])


def say(event: str, **fields: Any) -> None:
    """One event line."""
    os.write(EVENTS_FD, (json.dumps({"event": event} | fields) + "\n").encode())


def until_heard() -> None:
    """Wait until the runner has read all events: an interrupt sent now finds it in this case."""
    waiting = array.array("i", [1])
    while waiting[0]:
        fcntl.ioctl(EVENTS_FD, termios.FIONREAD, waiting)


def environment(device: str) -> dict[str, Any]:
    """A small environment of the contract's form."""
    cuda = device.startswith("cuda")
    visible = os.environ.get("FAKE_VISIBLE", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return {
        "device": device,
        "device_name": "Fake GPU" if cuda else "Fake CPU",
        "kind": "cuda" if cuda else "cpu",
        "threads": int(os.environ.get("OMP_NUM_THREADS", "2")),
        "cpu": {"model": "Fake CPU", "cores": 2, "load": time.monotonic()},
        "gpu": {"uuid_hash": uuid_hash(visible), "index": cuda_index(device)} if cuda else None,
        "versions": {"python": "3", "torch": os.environ.get("FAKE_TORCH", "1.0")},
        "switches": {},
        "project": {"commit": os.environ.get("FAKE_COMMIT", "c0ffee"), "dirty": False},
    }


def misbehave(name: str) -> None:
    """What a kernel under development does to its process."""
    if name == "segfault":
        ctypes.string_at(0)
    elif name == "aborts":
        print("Fatal Python error: made up in /home/someone/secret/kernel.py", flush=True)
        os.abort()
    elif name == "exits":
        os._exit(3)
    elif name == "exits_quietly":
        os._exit(0)
    elif name == "hangs":
        signal.pause()
    elif name == "hoards":
        hoard = []
        while True:
            hoard.append(bytearray(b"x") * (8 << 20))
            time.sleep(0.005)
    elif name == "binary":
        os.write(1, bytes(range(256)) * 4)
    elif name == "binary_death":
        os.write(2, b"\xff\xfe\x00\x01" * 100 + b"\n")
        os._exit(4)
    elif name == "garbage":
        os.write(EVENTS_FD, b'\xff\x00not json\n[1, 2]\n{"event": 5}\n\n')
    elif name == "foreign_record":
        other = Case.from_json(json.loads(Path(sys.argv[1]).read_text())["cases"][0])
        say("record", index=0, record=Record(other, 0, "ok").to_json() | {"case": {"operator": "lie"}})
    elif name == "hangs_up":
        os.close(EVENTS_FD)
        signal.pause()
    elif name == "leaves_child":
        if os.fork() == 0:
            signal.pause()
        os._exit(5)
    elif name == "interrupts_runner":
        until_heard()
        os.kill(os.getppid(), signal.SIGINT)
    elif name == "interrupts_twice":
        until_heard()
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()
    elif name == "kills_runner":
        print(os.getpid(), flush=True)
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    elif name == "meets":  # waits for the same case on other devices: alone it is timed out
        place = Path(os.environ["FAKE_PLACE"])
        (place / os.environ["SPIKEMARK_DEVICE"]).touch()
        while len(list(place.iterdir())) < int(os.environ["FAKE_COUNT"]):
            time.sleep(0.005)
    elif name == "alone":  # finds out whether another measures at the same time
        with Path(os.environ["FAKE_PLACE"], "here").open("x"):
            time.sleep(0.02)
        Path(os.environ["FAKE_PLACE"], "here").unlink()
    elif name == "falls_off" and os.environ.get("SPIKEMARK_DEVICE") == "cuda:1":
        Path(os.environ["FAKE_PLACE"], "gone").touch()
        os._exit(6)
    elif name == "speaks":
        os.write(2, b"Fatal Python error: another's words\n")
    elif name == "bulky":
        sys.stdout.write("z" * 1000)


def take_turns(plan: dict[str, Any], indices: list[int]) -> None:
    """Cases named ``turns_...`` are begun together; then each has two turns, doing in the second what its name says."""
    cases = {i: Case.from_json(plan["cases"][i]) for i in indices}
    for index, case in cases.items():
        say("start", index=index, key=case.key, log=log_position())
        say("stage", index=index, stage="warm-up")
    for number in range(2):
        for index, case in cases.items():
            say("turn", index=index, log=log_position())
            say("stage", index=index, stage="measure")
            if number == 1:
                misbehave(case.implementation.removeprefix("turns_"))
                if case.implementation == "turns_spoils":
                    say("record", index=index, record=Record(case, plan["pass_index"], "error", "leaks").to_json())
                    say("end", spoilt="leaks")
                    sys.exit()
    for index, case in cases.items():
        say("turn", index=index, log=log_position())
        samples = [1e-3] * 10
        say("record", index=index, record=Record(case, plan["pass_index"], "ok", samples=samples).to_json())


def main() -> None:
    """Measure every case of the plan in order."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    if os.environ.get("FAKE_BROKEN") and os.environ.get("FAKE_BROKEN_DEVICE", plan["device"]) == plan["device"]:
        print("ImportError: no module named kaputt", file=sys.stderr, flush=True)
        sys.exit(1)
    say("ready", environment=environment(plan["device"]), torch_import_s=0.003)
    if plan["calibrate"]:
        say("calibration", copy_bytes_per_s=1e10, samples=[1e-3], bytes=10**7, clock={})
    with Path(os.environ.get("FAKE_TRACE", os.devnull)).open("a") as file:
        trace = {"pid": os.getpid(), "pythonpath": os.environ.get("PYTHONPATH", ""), "plugins": plan["plugins"]}
        file.write(json.dumps(trace) + "\n")
    together = [i for i, data in enumerate(plan["cases"]) if data["implementation"].startswith("turns_")]
    if together:
        take_turns(plan, together)
    for index, data in enumerate(plan["cases"]):
        if index in together:
            continue
        case = Case.from_json(data)
        say("start", index=index, key=case.key, log=log_position())
        say("stage", index=index, stage="measure")
        misbehave(case.implementation)
        record = Record(case, plan["pass_index"], "ok", samples=[1e-3 * (1 + i / 100) for i in range(10)])
        if case.implementation == "skips":
            continue
        if case.implementation == "wrong":
            record = Record(case, plan["pass_index"], "incorrect", "spikes differ")
        elif case.implementation == "fails":
            record = Record(case, plan["pass_index"], "error", "CUDA error: unknown error")
        elif case.implementation == "absent":
            record = Record(case, plan["pass_index"], "unavailable", "install it")
        elif case.implementation == "bulky":
            record.samples = record.samples * 5000
        record.details |= {"order": index, "kernel_s": 0.002}
        if case.implementation == "tells":
            own = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "cpus": sorted(os.sched_getaffinity(0))}
            record.details |= own
        say("record", index=index, record=record.to_json())
        if case.implementation == "taints":
            break
    say("end")


if __name__ == "__main__":
    main()
