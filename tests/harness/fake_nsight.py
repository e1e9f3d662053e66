#!/usr/bin/env python3
"""Stands for nsys and ncu in tests: does what $FAKE_NSIGHT says, and writes its arguments to $FAKE_NSIGHT_LOG.

``good`` runs the target and writes a report; the report's export is built from the plan's case and calls. The others
write the target's outcome themselves, which is quicker: ``fails`` (exit code 3 with a message), ``nothing`` (exit code
0, no report), ``hangs``, ``partial`` (hangs after writing a part of a report), ``permission`` (ncu's message about
counters), ``truncated`` (an export cut off); ``no-target`` is a target that died.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

MODE = os.environ.get("FAKE_NSIGHT", "good")
DENIED = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters."


def value(option: str) -> str:
    """The value of ``--option=value`` or ``--option value``."""
    for index, word in enumerate(sys.argv):
        if word.startswith(option + "="):
            return word.split("=", 1)[1]
        if word == option:
            return sys.argv[index + 1]
    return ""


def target() -> list[str]:
    """The traced command: from the interpreter on."""
    start = next(i for i, word in enumerate(sys.argv[1:], 1) if word == "-m") - 1
    return sys.argv[start:]


def collect(report: Path) -> int:
    """``nsys profile`` and ``ncu``."""
    if MODE == "fails":
        print("some banner\nunrecognised option '--nvtx-capture'\nusage: nsys profile", file=sys.stderr)
        return 3
    if MODE == "hangs":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # a daemon of its own
        time.sleep(60)
    if MODE == "partial":
        report.write_text("half a rep")
        time.sleep(60)
    if MODE == "good":
        subprocess.run(target(), check=True)
    elif MODE != "no-target":
        outcome = json.loads(Path(target()[-1]).read_text())["outcome"]
        Path(outcome).write_text(json.dumps({"status": "ok", "reason": "", "ideal_bytes": 1, "moved_bytes": None}))
    if MODE == "permission":
        print(DENIED)
        return 1
    if MODE != "nothing":
        report.write_text(json.dumps(json.loads(Path(target()[-1]).read_text())["case"]))
    return 0


def export(report: Path, database: Path) -> int:
    """``nsys export``: three calls of the case, a kernel each, launched inside; the second runs on after its range."""
    from spikemark.harness.records import Case
    from spikemark.suites.synthetic_export import Export

    key = Case.from_json(json.loads(report.read_text())).key
    out = Export(database)
    calls = [out.range(f"profile {key}", t, t + 100, eventType=60, domainId=1, int64Value=i)
             for i, t in enumerate((1000, 2000, 3000))]  # fmt: skip
    flush = out.range(f"flush {key}", 500, 900, eventType=60, domainId=1)
    out.rows("NVTX_EVENTS", [out.domain("spikemark", 1), flush, *calls])
    out.rows("CUPTI_ACTIVITY_KIND_RUNTIME", [out.launch(t, t + 5, t) for t in (600, 1010, 2010, 3010, 4000)])
    out.rows("CUPTI_ACTIVITY_KIND_KERNEL", [
        out.kernel("flush", 610, 700, 600),
        *(out.kernel("neuron_kernel", t + 20, t + 20 + ns, t) for t, ns in ((1010, 50), (2010, 100), (3010, 50))),
        out.kernel("stray", 4010, 4020, 4000),
    ])  # fmt: skip
    out.close()
    if MODE == "truncated":
        data = database.read_bytes()
        database.write_bytes(data[: len(data) // 2])
    return 0


def print_csv() -> int:
    """``ncu --import``: two kernels, times and bytes in base units, a message before and after."""
    nvtx = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    names = ["ID", "Process ID", "Kernel Name", nvtx, "dram__bytes_read.sum", "dram__bytes_write.sum",
             "gpu__time_duration.sum", "sm__warps_active.avg.pct_of_peak_sustained_active",
             stall.format("long_scoreboard"), stall.format("wait")]  # fmt: skip
    units = ["", "", "", "", "byte", "byte", "nsecond", "%", "", ""]
    kernel = ["7", "neuron_kernel(float const*, int)", "1:spikemark:capture:none", "1,000", "200"]
    rows = [["0", *kernel, "3,000", "50", "4", "1"], ["1", *kernel, "1,000", "90", "2", "1"]]
    print("==PROF== Connected to process 7")
    for row in (names, units, *rows):
        print(",".join(f'"{cell}"' for cell in row))
    print("==PROF== Disconnected")
    return 0


def main() -> int:
    """As the first argument says."""
    with Path(os.environ["FAKE_NSIGHT_LOG"]).open("a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    if sys.argv[1] == "export":
        return export(Path(sys.argv[-1]), Path(value("--output")))
    if "--import" in sys.argv:
        return print_csv()
    return collect(Path(value("--output") or value("--export")))


if __name__ == "__main__":
    sys.exit(main())
