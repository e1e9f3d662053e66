"""Exports of our own ranges: each case's figures, what is listed as outside of all, and the cost of many cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from spikemark.harness.trace import nsys, nsys_sqlite
from spikemark.harness.trace.summary import MOST_KERNELS, TraceSummary
from spikemark.suites import synthetic_export
from spikemark.suites.synthetic_export import Export


def make(path: Path, keys: str, named: tuple[int, ...] = (1,), domain: int = 1) -> Path:
    """For each key a verify, a flush and a call, with a kernel of 50, 70 and 40 ns; after all of them a stray one.

    ``named`` are the domains called spikemark, ``domain`` is the one of the ranges.
    """
    export = Export(path)
    ranges = [export.domain("spikemark", number) for number in named]
    launches, kernels = [], []
    for place, key in enumerate(keys):
        for part, (stage, length) in enumerate((("verify", 50), ("flush", 70), ("profile", 40))):
            start = place * 1000 + part * 200
            ranges.append(export.range(f"{stage} {key}", start, start + 100, eventType=60, domainId=domain))
            launches.append(export.launch(start + 10, start + 12, start))
            kernels.append(export.kernel(f"{stage} kernel of {key}", start + 20, start + 20 + length, start))
    export.rows("NVTX_EVENTS", ranges)
    export.rows("CUPTI_ACTIVITY_KIND_RUNTIME", [*launches, export.launch(9000, 9002, 9000)])
    export.rows("CUPTI_ACTIVITY_KIND_KERNEL", [*kernels, export.kernel("stray", 9010, 9020, 9000)])
    export.close()
    return path


def kernels(one: TraceSummary) -> list[tuple[str, int]]:
    return [(row["name"], round(row["total_s"] * 1e9)) for row in one.kernels]


def outside(one: TraceSummary) -> list[str]:
    return [row["name"] for row in one.outside]


def test_one_cases_kernels_are_not_outside_for_the_others(tmp_path: Path) -> None:
    first, second, rest = nsys.summarise_file(make(tmp_path / "a.sqlite", "AB"))
    assert (first.key, kernels(first), outside(first)) == ("A", [("profile kernel of A", 40)], [])
    assert (second.key, kernels(second), outside(second)) == ("B", [("profile kernel of B", 40)], [])
    assert (rest.key, rest.title, outside(rest)) == ("", "a.sqlite", ["stray"])
    assert first.not_in_kernels == pytest.approx(0.6)


def test_with_one_case_the_stray_stands_with_it(tmp_path: Path) -> None:
    (one,) = nsys.summarise_file(make(tmp_path / "a.sqlite", "A"))
    assert (one.key, kernels(one), outside(one)) == ("A", [("profile kernel of A", 40)], ["stray"])


def test_a_second_domain_of_our_name_is_ours_too(tmp_path: Path) -> None:
    """Two copies of the NVTX library in one process: the ranges may be in either domain."""
    path = make(tmp_path / "a.sqlite", "A", named=(1, 2), domain=2)
    (one,) = nsys.summarise_file(path)
    assert (one.key, kernels(one), outside(one)) == ("A", [("profile kernel of A", 40)], ["stray"])
    assert not [note for note in one.notes if "another program" in note]
    assert kernels(nsys.summarise_case(path, "A")) == [("profile kernel of A", 40)]


def test_a_cases_own_trace_is_read_without_the_domains_name(tmp_path: Path) -> None:
    """The domain is created before collecting begins: an export may lack its name, never that of the range."""
    one = nsys.summarise_case(make(tmp_path / "a.sqlite", "A", named=()), "A")
    assert (one.calls, kernels(one)) == (1, [("profile kernel of A", 40)])


def test_many_cases_cost_what_they_hold_not_the_file_times_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the search for what is outside once a case, a million kernels of a thousand cases took an hour, not 30 s."""
    searches = []
    whole = nsys_sqlite.Trace.outside

    def counted(trace: nsys_sqlite.Trace, groups: object = None) -> object:
        searches.append(groups)
        return whole(trace, groups)  # type: ignore[arg-type]

    monkeypatch.setattr(nsys_sqlite.Trace, "outside", counted)
    synthetic_export.build(tmp_path / "a.sqlite", kernels=10_000, ranges=1_000)
    found = nsys.summarise_file(tmp_path / "a.sqlite")
    cases = [one for one in found if one.key]
    assert (len(cases), sum(one.calls for one in cases), len(searches)) == (1_000, 1_000, 1)
    assert sum(row["count"] for one in cases for row in one.kernels) == 9_000
    assert sum(row["count"] for row in found[-1].outside) == 1_000


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("outside", "3 more names of what ran outside are in the trace"),
        ("copies", "3 more kinds of copies are in the trace"),
        ("ranges", "3 more names of ranges are in the trace"),
    ],
)
def test_what_a_table_leaves_out_is_said_in_words(name: str, said: str) -> None:
    one = TraceSummary("nsys")
    one.keep(name, [{"name": str(i), "count": 1, "total_s": 0.0} for i in range(MOST_KERNELS + 3)])
    assert one.notes == [said]
