"""Synthetic histories: folders of finished runs, as many as wanted, whose times a test knows.

Every run is written and finished as a real one is (journal, results.csv, run.json with its proof), so that reading it
takes the ways that reading a real one takes. ``python tests/reports/histories.py DIR [RUNS [CASES]]`` makes a large one
and says how long it takes to open.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import synthetic
from spikemark.harness.records import Case
from spikemark.harness.runfolder import RunFolder

FIRST = datetime(2026, 1, 1, 6, 0, tzinfo=UTC)
Level = Callable[[int, int], float]
"""(index of the run, index of the case) -> factor on the case's time."""


def cases(count: int) -> list[Case]:
    """``count`` different cases."""
    layers = {f"net{i // 10}/conv{i % 10}": ((8 + i, 8, 8), 4 + i % 9) for i in range(1 + count // 16)}
    return list(synthetic.cases(("cpu",), layers, (1, 8)))[:count]


def started(run: int) -> str:
    """When a run began: four hours after the one before."""
    return (FIRST + timedelta(hours=4 * run)).isoformat()


def environment(run: int, **more: Any) -> dict[str, Any]:
    """As the run before, one commit later."""
    return synthetic.environment(project={"commit": f"{run:07x}{'c0ffee' * 5}", "dirty": False}, **more)


def write(
    path: Path,
    run: int,
    every: list[Case],
    level: Level = lambda run, case: 1.0,
    *,
    noise: float = 0.03,
    passes: int = 2,
    samples: int = 6,
    **meta: Any,
) -> Path:
    """One finished run: ``noise`` is the log deviation of a case's time between runs, a third of it between passes."""
    rng = random.Random(f"history {run} {path.name}")
    records = []
    for index, case in enumerate(every):
        centre = synthetic.true_time(case) * level(run, index) * math.exp(rng.gauss(0, noise))
        for p in range(passes):
            at = centre * math.exp(rng.gauss(0, noise / 3))
            times = [at * math.exp(abs(rng.gauss(0, 0.02))) for _ in range(samples)]
            records.append(replace(synthetic.record(case, p, 4), samples=times))
    environments = meta.pop("environments", {"cpu": environment(run)})
    synthetic.write(path, records, environments=environments, passes=passes, started=started(run), **meta)
    folder, _ = RunFolder.reopen(path)
    folder.finish(ended=started(run))
    return path


def folder(path: Path, runs: int, every: list[Case], level: Level = lambda run, case: 1.0, **more: Any) -> Path:
    """A folder of ``runs`` runs, named so that their order is not that of their dates."""
    for run in range(runs):
        write(path / f"{(run * 7919) % 10007:05d}", run, every, level, **more)
    return path


def _one(task: tuple[Path, int, int]) -> None:
    path, run, count = task
    slower = lambda run, case: 1.1 if run >= 600 and case % 10 == 0 else 1.0  # noqa: E731
    write(path / f"run{run:05d}", run, cases(count), slower, passes=5, samples=36)


def main() -> None:
    """Write a large history where there is none yet, then open it in fresh processes, with and without page."""
    path, runs, count = Path(sys.argv[1]), *(int(word) for word in [*sys.argv[2:4], "1000", "200"][:2])
    if not path.exists():
        began = time.monotonic()
        with ProcessPoolExecutor() as pool:
            list(pool.map(_one, [(path, run, count) for run in range(runs)], chunksize=8))
        print(f"written in {time.monotonic() - began:.0f} s")
    size = sum(file.stat().st_size for file in path.glob("*/cases.jsonl"))
    print(f"{runs} runs of {count} cases, journals of {size / 1e9:.2f} GB")
    for words in (["compare", "--history", str(path)], ["report", "--history", str(path)]):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "spikemark", *words], capture_output=True, text=True, check=False)
        print(f"{' '.join(words[:2])}: {time.monotonic() - began:.1f} s, exit code {done.returncode}{done.stderr}")
        print("\n".join(done.stdout.splitlines()[:3] + done.stdout.splitlines()[-4:]))


if __name__ == "__main__":
    main()
