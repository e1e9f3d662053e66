"""Chrome traces: figures of hand-made ones (of a GPU too, which is not here), merging, privacy, and bad files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from spikemark.harness.errors import UsageError
from spikemark.harness.trace import chrome, summary

KEY = "srm_neuron/forward/a"


def event(category: str, name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    """A complete event; times in µs."""
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "pid": 5, "tid": 5} | more


def kernel(name: str, start: float, length: float, correlation: int, category: str = "kernel") -> dict[str, Any]:
    return event(category, name, start, length, pid=0, tid=7, args={"correlation": correlation})


def launch(start: float, correlation: int) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", start, 2, args={"correlation": correlation})


def memory(time: float, total: int, kind: int = 0) -> dict[str, Any]:
    arguments = {"Total Allocated": total, "Bytes": 0, "Device Type": kind}
    return {"ph": "i", "name": "[memory]", "ts": time, "pid": 5, "tid": 5, "args": arguments}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": list(events), "baseTimeNanoseconds": 1000, "host_name": "secret", "traceName": "/tmp/x.json"}


def test_operators_of_a_cpu_are_counted_once_and_by_themselves() -> None:
    found = chrome.summarise(trace(
        event("user_annotation", KEY, 0, 300),
        event("user_annotation", "flush", 5, 50), event("cpu_op", "aten::sum", 10, 40),
        event("user_annotation", "call 0", 100, 100),
        event("cpu_op", "aten::mul", 110, 30), event("cpu_op", "aten::empty", 112, 10),
        event("cpu_op", "aten::mul", 150, 20, tid=6), event("cpu_op", "aten::add", 160, 25),
        event("cpu_op", "aten::after", 250, 10),
        memory(90, 1000), memory(113, 5000), memory(170, 2000),
    ), KEY)  # fmt: skip
    assert (found.unit, found.calls, found.wall_s) == ("operator", 1, pytest.approx(100e-6))
    rows = {r["name"]: (r["count"], round(r["total_s"] * 1e6)) for r in found.kernels}
    assert rows == {"aten::mul": (2, 40), "aten::empty": (1, 10), "aten::add": (1, 25)}
    # 110 to 140, and 150 to 185 on two threads at once
    assert found.busy_s == pytest.approx(65e-6)
    assert found.not_in_kernels == pytest.approx(0.35)
    assert [r["name"] for r in found.outside] == ["aten::after"], "the flush is no finding"
    assert found.peak_bytes == 4000
    assert found.timeline is not None
    lanes = {name: [(round(a * 1e6), round(b * 1e6)) for a, b, _ in spans] for name, spans in found.timeline.lanes}
    assert lanes == {"CPU thread 1": [(10, 30), (60, 25)], "CPU thread 2": [(50, 20)]}


def test_kernels_belong_to_the_call_that_launched_them() -> None:
    """The first call's last kernel runs on while the second is launched; a copy; one kernel launched between them."""
    found = chrome.summarise(trace(
        event("user_annotation", "call 0", 100, 50), event("user_annotation", "call 1", 200, 100),
        event("user_annotation", "flush", 160, 20),
        launch(110, 1), launch(120, 2), launch(165, 3), launch(185, 4), launch(210, 5), launch(212, 6),
        kernel("neuron", 130, 20, 1), kernel("neuron", 145, 60, 2), kernel("flushing", 210, 5, 3),
        kernel("stray", 220, 5, 4), kernel("neuron", 230, 30, 5), kernel("Memcpy HtoD", 265, 10, 6, "gpu_memcpy"),
        event("cpu_op", "aten::x", 105, 10),
        memory(201, 10**6, 1), memory(205, 3 * 10**6, 1), memory(206, 99, 0),
    ), KEY)  # fmt: skip
    assert found.unit == "kernel"
    assert [(r["name"], r["count"], round(r["total_s"] * 1e6)) for r in found.kernels] == [("neuron", 3, 110)]
    assert found.kernels[0]["launch_s"] == pytest.approx(20e-6)
    assert [r["name"] for r in found.copies] == ["Memcpy HtoD"]
    assert [r["name"] for r in found.outside] == ["stray"]
    # call 0 lasts until 205 (its last kernel), call 1 until 300
    assert found.wall_s == pytest.approx((105 + 100) * 1e-6)
    assert found.busy_s == pytest.approx((75 + 30) * 1e-6)
    assert found.idle_s == pytest.approx((105 - 75 + 100 - 40) * 1e-6)
    assert found.peak_bytes == 3 * 10**6


def test_kernels_without_a_launch_go_by_their_own_time_and_are_said() -> None:
    found = chrome.summarise(trace(event("user_annotation", "call 0", 100, 50), kernel("k", 120, 5, 9)), KEY)
    assert [r["name"] for r in found.kernels] == ["k"] and "launch_s" not in found.kernels[0]
    assert found.notes == ["1 kernels or copies have no launch in the trace: assigned to calls by their start"]


def test_a_trace_without_calls_and_events_of_other_programs() -> None:
    odd = [{"ph": "X", "cat": "cpu_op", "name": "no time"}, {"ph": "i", "name": "[memory]", "ts": 1}, {"ph": "Z"}]
    found = chrome.summarise(trace(*odd), KEY)
    assert found.notes == ["the trace has no measured call"] and found.wall_s is None


def test_merged_cases_are_groups_of_their_own() -> None:
    one = trace(
        {"ph": "M", "name": "process_name", "pid": 5, "args": {"name": "python"}},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        event("cpu_op", "a", 10, 1), kernel("k", 11, 1, 1),
        {"ph": "s", "id": 3, "ts": 10, "pid": 5, "tid": 5, "name": "ac2g", "cat": "ac2g"},
    )  # fmt: skip
    two = json.loads(json.dumps(one)) | {"baseTimeNanoseconds": 6000}
    merged = chrome.merge([("first", one), ("second", two)])
    events = merged["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert sorted(names.values()) == ["first", "first (GPU 0)", "second", "second (GPU 0)"]
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2, "arrows of two cases are not joined"
    assert [e["ts"] for e in events if e.get("name") == "a"] == [10, 15.0], "one clock"
    assert "host_name" not in merged


def test_saved_traces_do_not_tell_who_made_them(tmp_path: Path) -> None:
    chrome.save(tmp_path / "t.json.gz", trace(event("cpu_op", "a", 1, 1)))
    text = gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode()
    assert "secret" not in text and "/tmp" not in text
    assert chrome.load(tmp_path / "t.json.gz")["traceEvents"][0]["name"] == "a"


@pytest.mark.parametrize("content", [b"", b"{", b"[1", b"\x1f\x8b broken", b'{"other": 1}', b"3", b"null"])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"t\.json is no Chrome trace$"):
        chrome.load(tmp_path / "t.json")


def test_thinning_memory_keeps_the_peak_and_long_timelines_say_what_is_left_out() -> None:
    points = [memory(100.01 + i / 100, 10**6 if i == 2345 else i) for i in range(5000)]
    spans = [event("cpu_op", f"op{i % 3}", 101 + i * 0.04, 0.03) for i in range(1000)]
    found = chrome.summarise(trace(event("user_annotation", "call 0", 100, 60), *points, *spans), KEY)
    assert found.timeline is not None
    assert len(found.timeline.memory) <= chrome.MOST_MEMORY_POINTS + 1
    assert max(bytes_ for _, bytes_ in found.timeline.memory) == found.peak_bytes == 10**6
    assert found.timeline.left_out == 1000 - summary.MOST_SPANS


def test_summaries_are_read_as_written_and_damage_is_named(tmp_path: Path) -> None:
    one = chrome.summarise(trace(event("user_annotation", "call 0", 100, 60), event("cpu_op", "a", 110, 5)), KEY)
    one.files = [{"name": "../../etc/passwd", "what": "not in this folder"}]
    path = summary.write(tmp_path, one)
    for name, text in {
        "a": "{",
        "b": '{"schema": 99}',
        "c": "[]",
        "d": path.read_text().replace('"count": 1', '"count": "x"'),
    }.items():
        (tmp_path / f"{name}.torch.summary.json").write_text(text)
    found, damaged = summary.read_all(tmp_path)
    assert damaged == [f"{name}.torch.summary.json" for name in "abcd"]
    assert [f.key for f in found] == [KEY] and found[0].timeline == one.timeline and found[0].kernels == one.kernels
    assert found[0].files[0]["name"] == "passwd", "links never leave the folder"


def test_file_names_are_short_safe_and_unique() -> None:
    keys = ["a/b", "a:b", "x" * 500, "../..", "ü/💥", ""]
    stems = [summary.stem(key) for key in keys]
    assert len(set(stems)) == len(keys)
    assert all(len(s) < 120 and "/" not in s and not s.startswith(".") and s.isascii() for s in stems)
