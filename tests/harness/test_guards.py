"""Every watched piece of global state: named when it changes, put back, and not complained about otherwise."""

import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from spikemark.harness import allocator
from spikemark.harness.guards import GlobalState, Leftover, leak

MiB = 1 << 20
CHANGES: dict[str, Callable[[], object]] = {
    "thread count": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "grad mode": lambda: torch._C._set_grad_enabled(False),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "torch's random state": lambda: torch.rand(1),
    "Python's random state": lambda: random.random(),
    "numpy's random state": lambda: np.random.random(),
    "deterministic": lambda: torch._C._set_deterministic_algorithms(True, warn_only=True),
    "TF32": lambda: torch.set_float32_matmul_precision("high"),
    "cuDNN's switches": lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    "time.perf_counter": lambda: setattr(time, "perf_counter", lambda: 0.0),
    "time.sleep": lambda: setattr(time, "sleep", lambda s: None),
    "signal handlers": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "working directory": lambda: os.chdir("/"),
    "environment variables (SPIKEMARK_TEST)": lambda: os.environ.update(SPIKEMARK_TEST="1"),
    "sys.stdout": lambda: setattr(sys, "stdout", sys.__stderr__),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "profile function": lambda: sys.setprofile(lambda *a: None),
    "garbage collection": gc.disable,
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """What was before the test is put back after it even if the code under test does not."""
    before = GlobalState()
    yield
    before.settle()


@pytest.mark.parametrize("label", CHANGES)
def test_a_change_is_named_once_and_undone(label: str) -> None:
    state, watched = GlobalState(), GlobalState()
    CHANGES[label]()
    found = watched.settle()
    assert label in found
    assert found.startswith("changes global state: ")
    assert "\n" not in found
    assert watched.settle() == ""
    assert state.settle() == "", "the state before the change is back"


def test_nothing_changed() -> None:
    assert GlobalState().settle() == ""


def test_several_changes_are_one_line() -> None:
    watched = GlobalState()
    torch.manual_seed(1)
    os.chdir("/")
    assert watched.settle() == "changes global state: torch's random state; the working directory"


def test_a_deleted_working_directory(tmp_path: Path) -> None:
    watched = GlobalState()
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "working directory" in watched.settle()


def test_compilers_may_set_their_variables_but_nobody_may_change_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_TEST", raising=False)
    watched = GlobalState()
    os.environ["TORCHINDUCTOR_TEST"] = "1"
    assert watched.settle() == ""
    assert watched.notes == ["set the environment variable TORCHINDUCTOR_TEST"]
    assert os.environ["TORCHINDUCTOR_TEST"] == "1"
    os.environ["TORCHINDUCTOR_TEST"] = "2"
    assert "TORCHINDUCTOR_TEST" in watched.settle()
    assert os.environ.pop("TORCHINDUCTOR_TEST") == "1"


def test_warning_filters_are_undone_and_noted() -> None:
    watched = GlobalState()
    warnings.simplefilter("ignore")
    before = watched._filters
    assert watched.settle() == ""
    assert list(warnings.filters) == before
    assert watched.notes == ["changed the warning filters (undone)"]


def test_threads_left_behind() -> None:
    watched, stop = Leftover(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="mine", daemon=True)
    lasting = threading.Thread(target=lambda: stop.wait(), name="other", daemon=True)
    assert watched.threads() == ""
    lasting.start()
    try:
        assert watched.threads() == "leaves 1 thread running after its calls: 'other'"
        assert Leftover().threads() == "", "a thread that was there before is nobody's fault"
    finally:
        stop.set()
        lasting.join()
    assert watched.threads() == ""
    assert not thread.is_alive()


def test_threads_of_an_executor_may_stay() -> None:
    """torch's compiler keeps one."""
    watched = Leftover()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert len(Leftover().before - watched.before) == 1 and watched.threads() == ""


def test_a_thread_that_is_about_to_end_gets_the_time_to() -> None:
    watched = Leftover()
    threading.Thread(target=lambda: time.sleep(0.005)).start()
    assert watched.threads() == ""


@pytest.mark.parametrize(
    ("resident", "calls", "leaks"),
    [
        ([0, 20 * MiB, 40 * MiB], [0, 10, 20], True),
        ([0, 1 * MiB, 2 * MiB], [0, 10, 20], False),  # too little in all
        ([0, 40 * MiB, 40 * MiB], [0, 10, 20], False),  # once, not with every call
        ([0, 0, 40 * MiB], [0, 10, 20], False),
        ([0, 9 * MiB, 18 * MiB], [0, 1000, 2000], False),  # 9 KiB a call
        ([5 * MiB, 4 * MiB, 3 * MiB], [0, 10, 20], False),
        ([0, 40 * MiB], [0, 10], False),  # two moments cannot tell a step from a slope
    ],
)
def test_a_leak_is_growth_with_every_call(resident: list[int], calls: list[int], leaks: bool) -> None:
    found = leak(resident, calls)
    assert bool(found) == leaks
    if leaks:
        assert found == "leaks memory: the process grew by 40 MiB in 20 calls, 2 MiB each"


def test_trim_gives_memory_back() -> None:
    allocator.trim()
