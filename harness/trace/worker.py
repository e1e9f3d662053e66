"""The process in which torch.profiler traces cases: it speaks the protocol of a measuring process (``session``).

``python -m spikemark.harness.trace.worker PLAN EVENTS_FD TRACES CALLS`` writes a Chrome trace and a summary for each of
the plan's cases into the folder TRACES; the record that it sends holds no times.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from spikemark.harness.process import log_position
from spikemark.harness.records import ERROR, OK, OUT_OF_MEMORY, Case, Record


class Channel:
    """The worker's end of the protocol: one JSON line an event."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, event: str, **fields: Any) -> None:
        """Write one event; it is out when this returns."""
        line = (json.dumps({"event": event} | fields) + "\n").encode()
        while line:
            line = line[os.write(self._descriptor, line) :]


def read_plan(path: str) -> tuple[dict[str, Any], list[Case]]:
    """A plan and its cases, with its plug-ins loaded."""
    from spikemark.kernels import registry

    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    for file in plan.get("plugins", []):
        registry.load_plugin(file)
    return plan, [Case.from_json(c) for c in plan["cases"]]


def attempt(record: Record, work: Any) -> None:
    """Call ``work()``; what it raises becomes the record's status and reason."""
    import torch
    from spikemark.harness.measure import describe, one_line
    from spikemark.harness.verify import Refused

    try:
        work()
    except Refused as refused:
        record.status, record.reason = refused.status, one_line(refused.reason)
    except (MemoryError, torch.OutOfMemoryError) as error:
        record.status, record.reason = OUT_OF_MEMORY, one_line(describe(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a kernel raises is its result
        record.status, record.reason = ERROR, one_line(describe(error))


def trace(case: Case, folder: Path, calls: int, stage: Any) -> None:
    """Trace one case with torch.profiler; writes the trace and its summary."""
    from spikemark.harness.trace import chrome, summary
    from spikemark.harness.trace.probe import Probe
    from torch.profiler import ProfilerActivity, profile

    probe = Probe(case, stage)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if probe.clock.cuda else [])
    stage("profile")
    with profile(activities=activities, profile_memory=True) as profiler:
        probe.calls(calls)
    probe.recheck()
    stage("read")
    with tempfile.TemporaryDirectory(prefix="spikemark-trace-") as temporary:
        raw = Path(temporary) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        data = chrome.load(raw)
    name = f"{summary.stem(case.key)}.torch.json.gz"
    folder.mkdir(parents=True, exist_ok=True)
    chrome.save(folder / name, data)
    found = chrome.summarise(data, case.key)
    found.files = [{"name": name, "what": "Chrome trace (Perfetto)"}]
    found.ideal_bytes, found.moved_bytes = probe.cost.bytes, probe.moved_bytes
    summary.write(folder, found)


def _start_profiler() -> None:
    """The first use of the profiler initialises it, in tens of milliseconds that belong to no case."""
    from spikemark.kernels import spans
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]):
        pass
    spans.listen(record_function)  # torch.profiler shows the layers' spans; NVTX has nobody to hear it here


def main(arguments: list[str]) -> int:
    """Trace the plan's cases in its order."""
    plan_path, descriptor, folder, calls = arguments
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    from spikemark.harness import conditions, environment
    from spikemark.harness.measure import placed

    conditions.settle()
    channel = Channel(int(descriptor))
    plan, cases = read_plan(plan_path)
    with placed(plan["device"]):
        channel.say("ready", environment=environment.collect(plan["device"]))
        _start_profiler()
        for index, case in enumerate(cases):
            channel.say("start", index=index, key=case.key, log=log_position())
            record = Record(case, plan["pass_index"], OK, environment=plan["environment"], started_s=time.time())

            def stage(name: str, index: int = index) -> None:
                channel.say("stage", index=index, stage=name)

            attempt(record, lambda case=case, stage=stage: trace(case, Path(folder), int(calls), stage))
            record.elapsed_s = time.time() - record.started_s
            channel.say("record", index=index, record=record.to_json())
    channel.say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
