"""Reading Nsight Systems exports: true values of a real one, by hand from SQL, and every kind by construction."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from spikemark.harness.errors import UsageError
from spikemark.harness.trace import nsys_events, nsys_sqlite
from spikemark.harness.trace.nsys_sqlite import RangeUse, Trace
from spikemark.suites.synthetic_export import PROCESS, THREAD, Export

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "nsys-2022-saxpy-mpi.sqlite"
NVTX, KERNEL, RUNTIME = "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"


def by_name(trace: Trace) -> dict[str, RangeUse]:
    return {group.name: group for group in trace.groups()}


def times(trace: Trace, group: RangeUse) -> list[int]:
    """Nanoseconds of a group's kernels, in order of launch."""
    inside = trace.within(group)
    return [int(n) for n in trace.activities.end[inside] - trace.activities.start[inside]]


@pytest.mark.skipif(not REAL.exists(), reason="shared/data/nsys-2022-saxpy-mpi.sqlite is not here")
def test_a_real_export_gives_its_true_kernels_and_ranges() -> None:
    """Expected values: SELECT "end" - start FROM CUPTI_ACTIVITY_KIND_KERNEL, and the like, read off by hand."""
    trace = nsys_sqlite.read(REAL)
    assert (trace.schema, trace.notes) == ("2.9.1", [])
    assert len(trace.ranges) == 22
    groups = by_name(trace)
    counts = {name: (g.domain, g.count, g.kernels) for name, g in groups.items()}
    assert counts == {
        "saxpy": ("", 5, 5),
        "MPI_Init": ("MPI", 1, 0),
        "MPI_Send": ("MPI", 10, 0),
        "MPI_Recv": ("MPI", 5, 0),
        "MPI_Finalize": ("MPI", 1, 0),
    }
    saxpy = groups["saxpy"]
    assert times(trace, saxpy) == [17704808, 17733416, 17700808, 17720488, 17713960]
    # 59054 + 47452 + 41921 + 41711 + 41110 ns between push and pop; the sum of the five kernels above
    assert saxpy.wall_s == pytest.approx(231248e-9)
    assert saxpy.kernel_s == pytest.approx(88573480e-9)
    assert saxpy.busy_s == pytest.approx(88573480e-9)
    # from each push to its kernel's end: 17745137 + 17771886 + 17738962 + 17758051 + 17751471 ns
    assert saxpy.window_s == pytest.approx(88765507e-9)
    assert saxpy.idle_s == pytest.approx((88765507 - 88573480) * 1e-9)
    (kernel,) = trace.table(trace.within(saxpy))
    assert (kernel.name, kernel.count) == ("saxpy(double *, double *, double *, double, int)", 5)
    # from cudaLaunchKernel to the start: 32354, 33220, 32724, 33114, 32451 ns (the outer of its two records)
    assert kernel.launch_s == pytest.approx(32724e-9)
    assert groups["MPI_Init"].wall_s == pytest.approx((710796807 - 65117824) * 1e-9)
    outside = trace.outside()
    assert trace.table(outside) == []
    copies = {c.name: (c.count, c.bytes) for c in trace.table(outside, nsys_events.COPY)}
    assert copies == {"host to device": (10, 10 * 262144000), "device to host": (5, 5 * 262144000)}


def make(path: Path, text_names: bool = False) -> Path:
    """Three kernels of 10, 20 and 30 ns: two in nested ranges (overlapping on the device), one after both; one copy."""
    export = Export(path, text_names)
    export.rows(NVTX, [
        export.domain("spikemark", 1),
        export.range("measure", 4, None, eventType=33, domainId=1, category=4),
        export.range("case", 100, 1000, eventType=60, domainId=1, category=None),
        export.range("measure cold case", 200, 600, eventType=60, domainId=1, category=4, int64Value=0),
    ])  # fmt: skip
    export.rows(RUNTIME, [export.launch(210, 220, 1), export.launch(230, 240, 2), export.launch(1100, 1110, 3),
                          export.launch(700, 710, 4)])  # fmt: skip
    export.rows(KERNEL, [export.kernel("second", 305, 325, 2), export.kernel("first", 300, 310, 1),
                         export.kernel("third", 1200, 1230, 3)])  # fmt: skip
    export.rows("CUPTI_ACTIVITY_KIND_MEMCPY", [
        {"start": 720, "end": 760, "correlationId": 4, "globalPid": PROCESS, "bytes": 4096, "copyKind": 1}
    ])  # fmt: skip
    export.close()
    return path


@pytest.mark.parametrize("text_names", [False, True], ids=["string ids", "text"])
def test_kernels_belong_to_the_ranges_open_at_their_launch(tmp_path: Path, text_names: bool) -> None:
    trace = nsys_sqlite.read(make(tmp_path / "a.sqlite", text_names))
    assert trace.notes == []
    groups = by_name(trace)
    case, sample = groups["case"], groups["measure cold case"]
    assert (sample.domain, sample.category, sample.kind, sample.kernels) == ("spikemark", "measure", "start/end", 2)
    assert (case.category, case.kernels, case.copies, case.copy_bytes) == ("", 2, 1, 4096)
    assert [k.name for k in trace.table(trace.within(sample))] == ["second", "first"]
    assert sample.kernel_s == pytest.approx(30e-9)
    assert sample.busy_s == pytest.approx(25e-9)  # 300 to 325: the overlap counts once
    assert (sample.window_s, sample.idle_s) == (pytest.approx(400e-9), pytest.approx(375e-9))
    assert case.idle_s == pytest.approx((900 - 25 - 40) * 1e-9)
    assert case.gap_s == pytest.approx((720 - 325) * 1e-9)
    assert [k.name for k in trace.table(trace.outside())] == ["third"]
    assert trace.ranges.payload == [None, 0]


def test_ten_kernels_in_one_range_and_thirty_in_another_are_not_counted_off(tmp_path: Path) -> None:
    """Kernels run later and in another order than they were launched."""
    export = Export(tmp_path / "a.sqlite")
    export.rows(NVTX, [export.range("ten", 0, 99), export.range("thirty", 100, 399)])
    export.rows(RUNTIME, [export.launch(i * 10 + 1, i * 10 + 2, i) for i in range(40)])
    order = [*range(25, 40), *range(25)]
    export.rows(KERNEL, [export.kernel("k", 5000 + n * 100, 5000 + n * 100 + 1 + i, i) for n, i in enumerate(order)])
    export.close()
    trace = nsys_sqlite.read(tmp_path / "a.sqlite")
    groups = by_name(trace)
    assert (groups["ten"].kernels, groups["thirty"].kernels) == (10, 30)
    assert sorted(times(trace, groups["ten"])) == list(range(1, 11))


def test_push_pop_ranges_hold_one_thread_and_start_end_ranges_all(tmp_path: Path) -> None:
    """What autograd's thread launches is in the start/end range and not in the main thread's push/pop range."""
    export = Export(tmp_path / "a.sqlite")
    export.rows(NVTX, [export.range("local", 0, 100), export.range("everywhere", 0, 100, eventType=60)])
    export.rows(RUNTIME, [export.launch(10, 11, 1), export.launch(20, 21, 2, globalTid=THREAD + 1)])
    export.rows(KERNEL, [export.kernel("mine", 30, 40, 1), export.kernel("autograd's", 40, 50, 2)])
    export.close()
    groups = by_name(nsys_sqlite.read(tmp_path / "a.sqlite"))
    assert (groups["local"].kernels, groups["everywhere"].kernels) == (1, 2)


def test_processes_with_the_same_correlation_ids_are_told_apart(tmp_path: Path) -> None:
    other = 0x1000000 * 9
    export = Export(tmp_path / "a.sqlite")
    export.rows(
        NVTX, [export.range("a", 0, 100, eventType=60), export.range("b", 0, 100, eventType=60, globalTid=other + 9)]
    )
    export.rows(RUNTIME, [export.launch(10, 11, 1), export.launch(500, 501, 1, globalTid=other + 9)])
    export.rows(KERNEL, [export.kernel("in a", 20, 30, 1), export.kernel("late", 510, 520, 1, globalPid=other)])
    export.close()
    trace = nsys_sqlite.read(tmp_path / "a.sqlite")
    groups = by_name(trace)
    assert (groups["a"].kernels, groups["b"].kernels) == (1, 0)
    assert [k.name for k in trace.table(trace.outside())] == ["late"]


def test_lazily_absent_tables(tmp_path: Path) -> None:
    export = Export(tmp_path / "no-ranges.sqlite")
    export.rows(RUNTIME, [export.launch(10, 11, 1)])
    export.rows(KERNEL, [export.kernel("k", 20, 30, 1)])
    export.close()
    trace = nsys_sqlite.read(tmp_path / "no-ranges.sqlite")
    assert trace.groups() == [] and [k.name for k in trace.table(trace.outside())] == ["k"]
    assert trace.notes == ["no NVTX range was recorded: kernels cannot be assigned to cases"]

    export = Export(tmp_path / "no-kernels.sqlite")
    export.rows(NVTX, [export.range("a", 0, 100)])
    export.close()
    trace = nsys_sqlite.read(tmp_path / "no-kernels.sqlite")
    assert by_name(trace)["a"].kernels == 0
    assert "nothing ran on a GPU" in trace.notes[0]

    export = Export(tmp_path / "no-launches.sqlite")
    export.rows(NVTX, [export.range("a", 0, 100)])
    export.rows(KERNEL, [export.kernel("k", 20, 30, 1), export.kernel("late", 200, 210, 2)])
    export.close()
    trace = nsys_sqlite.read(tmp_path / "no-launches.sqlite")
    assert by_name(trace)["a"].kernels == 1
    assert trace.notes == [
        "launching calls were not recorded: kernels are assigned to ranges by their time on the device"
    ]


def test_an_old_schema_without_process_ids_and_a_new_one_without_text(tmp_path: Path) -> None:
    export = Export(tmp_path / "old.sqlite")
    drop = ("globalPid", "shortName")
    export.rows(NVTX, [{k: v for k, v in export.range("a", 0, 100).items() if k not in ("domainId", "category")}])
    export.rows(RUNTIME, [export.launch(10, 11, 1)])
    export.rows(KERNEL, [{k: v for k, v in export.kernel("k", 20, 30, 1).items() if k not in drop}])
    export.rows("META_DATA_EXPORT", [{"name": "EXPORT_SCHEMA_VERSION", "value": "3.17.4"}])
    export.close()
    trace = nsys_sqlite.read(tmp_path / "old.sqlite")
    assert trace.schema == "3.17.4" and trace.notes == []
    assert by_name(trace)["a"].kernels == 1


def test_cuda_graphs_traced_as_a_whole_are_time_on_the_device(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.rows(NVTX, [export.range("a", 0, 100)])
    export.rows(RUNTIME, [export.launch(10, 11, 1)])
    export.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", [{"start": 20, "end": 90, "correlationId": 1, "globalPid": PROCESS}])
    export.close()
    trace = nsys_sqlite.read(tmp_path / "a.sqlite")
    assert by_name(trace)["a"].busy_s == pytest.approx(70e-9)
    assert "not traced one by one" in trace.table(trace.within(by_name(trace)["a"]))[0].name


def test_what_makes_no_sense_is_left_out_and_said(tmp_path: Path) -> None:
    """Open ranges, negative durations, NULL and text where a time should be, two domains of one name."""
    export = Export(tmp_path / "a.sqlite")
    export.rows(NVTX, [
        export.domain("twin", 1),
        export.domain("twin", 2),
        export.range("one", 0, 100, domainId=1),
        export.range("one", 0, 100, domainId=2),
        export.range("open", 50, None),
        export.range("backwards", 90, 80),
    ])  # fmt: skip
    export.rows(RUNTIME, [export.launch(60 + i, 61 + i, i) for i in range(5)])
    export.rows(KERNEL, [
        export.kernel("good", 70, 80, 0),
        export.kernel("backwards", 80, 70, 1),
        export.kernel("no end", 80, None, 2),  # type: ignore[arg-type]
        export.kernel("text", "soon", 90, 3),  # type: ignore[arg-type]
        export.kernel("last", 100, 150, 4),
    ])  # fmt: skip
    export.close()
    trace = nsys_sqlite.read(tmp_path / "a.sqlite")
    assert trace.notes == [
        "2 rows of CUPTI_ACTIVITY_KIND_KERNEL lack start or end: left out",
        "1 rows of CUPTI_ACTIVITY_KIND_KERNEL end before they start: left out",
        "1 NVTX ranges end before they start: left out",
        "1 NVTX ranges were never closed: taken to last until the end of the trace",
        "2 domains have the name 'twin': told apart as 'twin', 'twin #2', ...",
    ]
    groups = {(g.domain, g.name): g for g in trace.groups()}
    assert set(groups) == {("twin", "one"), ("twin #2", "one"), ("", "open")}
    opened = groups["", "open"]
    assert (opened.unclosed, opened.kernels, opened.wall_s) == (1, 2, pytest.approx(100e-9))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.rows(NVTX, [export.range("a", 0, 100)])
    export.rows(KERNEL, [{k: v for k, v in export.kernel("k", 20, 30, 1).items() if k != "end"}])
    export.close()
    trace = nsys_sqlite.read(tmp_path / "a.sqlite")
    assert trace.notes[0] == "table CUPTI_ACTIVITY_KIND_KERNEL lacks the column end: its rows are left out"
    assert by_name(trace)["a"].kernels == 0


def big(path: Path) -> bytes:
    """The bytes of an export of many pages, all in one range."""
    export = Export(path)
    export.rows(NVTX, [export.range("a", 0, 10**9)])
    export.rows(RUNTIME, [export.launch(i, i + 1, i) for i in range(20000)])
    export.rows(KERNEL, [export.kernel("k", i, i + 1, i) for i in range(20000)])
    export.close()
    return path.read_bytes()


def test_damage_in_the_middle_gives_a_partial_result(tmp_path: Path) -> None:
    data = big(tmp_path / "a.sqlite")
    middle = int(len(data) * 0.8) // 4096 * 4096
    (tmp_path / "a.sqlite").write_bytes(data[:middle] + bytes(8192) + data[middle + 8192 :])
    trace = nsys_sqlite.read(tmp_path / "a.sqlite")
    assert any(f"table {KERNEL} is damaged after" in note and "the rest is missing" in note for note in trace.notes)


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.0001])
def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, keep: float) -> None:
    data = big(tmp_path / "a.sqlite")
    (tmp_path / "a.sqlite").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UsageError) as error:
        nsys_sqlite.read(tmp_path / "a.sqlite")
    assert "a.sqlite is " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.sqlite", b"", "is empty: the export was not finished"),
        ("text.sqlite", b"Generating SQLite file ...", "is no SQLite database"),
        ("a.nsys-rep", b"\x00\x01", "export it first, `nsys export --type=sqlite"),
        ("header.sqlite", b"SQLite format 3\x00", "is a SQLite database that is cut off or damaged"),
    ],
)
def test_what_is_no_export_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as error:
        nsys_sqlite.read(tmp_path / name)
    assert said in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


def test_another_programs_database_and_no_file_at_all(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "bookmarks.sqlite")
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(UsageError, match="holds neither CUDA activities nor NVTX ranges"):
        nsys_sqlite.read(tmp_path / "bookmarks.sqlite")
    with pytest.raises(UsageError, match=r"cannot read .*absent.sqlite: No such file"):
        nsys_sqlite.read(tmp_path / "absent.sqlite")


def test_slices_and_unions_agree_with_a_plain_loop(tmp_path: Path) -> None:
    """Random ranges that cross each other, random kernels on several streams: against the definition, pair by pair."""
    import random

    rng = random.Random(3)
    export = Export(tmp_path / "a.sqlite")
    spans: list[Any] = [(f"r{i % 7}", s := rng.randrange(3000), s + rng.randrange(1500)) for i in range(60)]
    export.rows(NVTX, [export.range(n, s, e, eventType=60) for n, s, e in spans])
    calls = [(t := rng.randrange(5000), k := t + rng.randrange(300), k + 1 + rng.randrange(200)) for _ in range(200)]
    export.rows(RUNTIME, [export.launch(t, t + 1, i) for i, (t, _, _) in enumerate(calls)])
    export.rows(KERNEL, [export.kernel("k", k, e, i) for i, (_, k, e) in enumerate(calls)])
    export.close()
    trace = nsys_sqlite.read(tmp_path / "a.sqlite")
    for name, group in by_name(trace).items():
        kernels = busy = window = 0
        for _, start, end in (s for s in spans if s[0] == name):
            inside = [(k, e) for t, k, e in calls if start <= t <= end]
            kernels += len(inside)
            busy += len({ns for k, e in inside for ns in range(k, e)})
            window += max([end, *(e for _, e in inside)]) - start
        assert group.kernels == kernels
        assert group.busy_s == pytest.approx(busy * 1e-9)
        assert group.window_s == pytest.approx(window * 1e-9)
    want = sum(not any(s <= t <= e for _, s, e in spans) for t, _, _ in calls)
    assert len(trace.outside()) == want > 0
