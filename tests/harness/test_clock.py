"""The clock runs only while the kernel does, whatever the kernel does to ``time``; caches are read from the machine."""

import time
from pathlib import Path

import pytest
import torch
from spikemark.harness import clock as module
from spikemark.harness.clock import DeviceClock, cache_bytes, flush_bytes, thread_count, torch_device


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A counter that every reading of the clock's source advances by 1 µs; element 0 is nanoseconds."""
    now = [0]

    def read() -> int:
        now[0] += 1000
        return now[0]

    monkeypatch.setattr(module, "now_ns", read)
    return now


def test_it_advances_only_inside_running(ticking: list[int]) -> None:
    clock = DeviceClock("cpu")
    ticking[0] += 10**9
    assert clock() == 0.0
    with clock.running():
        ticking[0] += 5_000_000
    assert clock() == clock.last_s == pytest.approx(0.005001, abs=1e-12)
    ticking[0] += 10**9
    assert clock() == pytest.approx(0.005001, abs=1e-12)


def test_run_times_the_call_and_returns_its_result(ticking: list[int]) -> None:
    clock = DeviceClock("cpu")

    def call(argument: int) -> int:
        ticking[0] += 7_000
        return argument + 1

    assert [clock.run(call, 1), clock.run(call, 2)] == [2, 3]
    assert clock.last_s == pytest.approx(8e-6, abs=1e-12)
    assert clock() == pytest.approx(16e-6, abs=1e-12)


def test_call_time_does_not_advance_it(ticking: list[int]) -> None:
    clock = DeviceClock("cpu")
    result, seconds = clock.call_time(lambda x: x, 5)
    assert (result, clock()) == (5, 0.0)
    assert seconds == pytest.approx(1e-6, abs=1e-12)


def test_a_call_that_raises_inside_running_is_still_counted(ticking: list[int]) -> None:
    clock = DeviceClock("cpu")
    with pytest.raises(RuntimeError), clock.running():
        raise RuntimeError
    assert clock() == pytest.approx(1e-6, abs=1e-12)


def test_replacing_the_functions_of_module_time_does_not_fool_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DeviceClock("cpu")
    for name in ("perf_counter", "perf_counter_ns", "monotonic", "time"):
        monkeypatch.setattr(time, name, lambda: 0)
    clock.run(lambda seconds: time.sleep(seconds), 0.004)
    assert 0.004 <= clock.last_s < 10


def test_pytest_benchmark_can_show_it() -> None:
    from pytest_benchmark.utils import NameWrapper, funcname

    clock = DeviceClock("cpu")
    assert funcname(clock) == "DeviceClock"
    assert "DeviceClock" in str(NameWrapper(clock))


def test_flush_reads_more_than_the_caches_hold() -> None:
    device = torch.device("cpu")
    assert module.MIN_FLUSH <= flush_bytes(device) <= module.MAX_FLUSH
    assert flush_bytes(device) >= min(cache_bytes(device), module.MAX_FLUSH)
    DeviceClock("cpu").flush()
    buffer, total = module._flush_buffer(device)
    assert buffer.numel() * 4 == flush_bytes(device)
    assert float(total) == buffer.numel(), "the sum of ones is their number: all of the buffer was read"


def _cache(root: Path, cpu: int, index: int, level: int, size: str, shared: str) -> None:
    folder = root / f"cpu{cpu}" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
        (folder / name).write_text(text + "\n")


def test_last_level_caches_are_added_and_shared_ones_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        _cache(tmp_path, cpu, 0, 1, "32K", str(cpu))
        _cache(tmp_path, cpu, 3, 3, "16384K", shared)
    assert module._host_cache_bytes(tmp_path) == 32 << 20
    (tmp_path / "cpu2" / "cache" / "index3" / "size").write_text("2M\n")
    assert module._host_cache_bytes(tmp_path) == 18 << 20
    assert module._host_cache_bytes(tmp_path / "nothing") == 0


def test_devices() -> None:
    assert torch_device("cpu") == torch_device("cpu:4") == torch.device("cpu")
    assert torch_device("cuda") == torch.device("cuda", 0)
    assert torch_device("cuda:1") == torch.device("cuda", 1)
    assert [thread_count(d) for d in ("cpu", "cpu:3", "cuda:1")] == [None, 3, None]
    for bad in ("cpu:0", "cpu:x", "cpu:-1"):
        with pytest.raises(ValueError, match=bad):
            thread_count(bad)
