"""The process that Nsight traces: one verified case, called a few times where the tool collects.

``python -m spikemark.harness.trace.target PLAN``; the plan names the file that gets the outcome, since tools do not
hand descriptors on. The file is written even where the tool fails later: it says whether the case was right.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from spikemark.harness.records import OK, Case, Record


def write_plan(folder: Path, case: Case, plugins: list[str], calls: int, capture: str) -> tuple[Path, Path]:
    """Write the plan of one case into ``folder``; the plan, and where the outcome will be."""
    plan, outcome = folder / "plan.json", folder / "outcome.json"
    outcome.unlink(missing_ok=True)
    data: dict[str, Any] = {"case": case.to_json(), "plugins": plugins, "calls": calls, "capture": capture}
    plan.write_text(json.dumps(data | {"outcome": str(outcome)}), encoding="utf-8")
    return plan, outcome


def read_outcome(path: Path) -> dict[str, Any] | None:
    """What the process wrote: ``status, reason, ideal_bytes, moved_bytes``; None if it died before."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "status" in found else None


def main(arguments: list[str]) -> int:
    """Call the case as the plan says; exit code 0 even if it is refused: the outcome says so."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    from spikemark.harness import conditions
    from spikemark.harness.measure import placed
    from spikemark.harness.trace.probe import Probe
    from spikemark.harness.trace.worker import attempt
    from spikemark.kernels import registry

    conditions.settle()
    plan = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    case = Case.from_json(plan["case"])
    record = Record(case, 0, OK)
    cost: dict[str, int | None] = {}

    def work() -> None:
        for file in plan["plugins"]:
            registry.load_plugin(file)
        with placed(case.device):
            probe = Probe(case, lambda name: None)
            cost.update(ideal_bytes=probe.cost.bytes, moved_bytes=probe.moved_bytes)
            probe.calls(plan["calls"], plan["capture"])
            probe.recheck()

    attempt(record, work)
    text = json.dumps({"status": record.status, "reason": record.reason} | cost)
    Path(plan["outcome"]).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
