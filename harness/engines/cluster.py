"""A run on the nodes of a cluster, from its first line to its last; on one machine that is ``harness.runs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from spikemark.harness import runs
from spikemark.harness.engines import kinds, parcel, ray_engine
from spikemark.harness.engines.gathering import Gathering
from spikemark.harness.errors import UsageError
from spikemark.harness.interrupts import Interrupts
from spikemark.harness.plan import RunOptions, RunResult
from spikemark.harness.process import WorkerCommand
from spikemark.harness.progress import Progress, make_progress
from spikemark.harness.records import Case
from spikemark.harness.runfolder import StorageError


def run(
    address: str | None,
    asked: Sequence[str],
    every: bool,
    devices: Sequence[str],
    cases_of: Callable[[Sequence[str]], list[Case]],
    options_of: Callable[[Sequence[Case]], RunOptions],
    worker_command: WorkerCommand,
    argv: Sequence[str],
    progress: Progress | None = None,
) -> RunResult:
    """Measure on one node a kind (``every``: on every node) of the ``asked`` kinds, into one run folder here.

    ``cases_of`` makes the cases of devices as the nodes call them, ``options_of`` the options for all of them. Returns
    and raises as ``runs.run``; what could not be measured has rows with the reason.
    """
    interrupts = Interrupts()
    with ray_engine.connected(address) as ray, interrupts.heard():
        found = kinds.jobs(kinds.hosts(ray.nodes()), asked, every, devices)
        cases = cases_of(list(dict.fromkeys(device for job in found for device in job.devices)))
        runs.check(cases)
        options = options_of(cases)
        inputs = parcel.inputs(cases, options.plugins)
        folder, before = runs.open_folder(cases, options, argv)
        with progress or make_progress() as shown:
            gathering = Gathering(folder, before, shown, every)
            for job in found:
                gathering.expect(job, [case for case in cases if case.device in job.devices], options)
            shown.begin(gathering.left)
            try:
                complete = ray_engine.Engine(ray, gathering, inputs, worker_command, every, interrupts).run()
            except (UsageError, StorageError):
                with suppress(StorageError):
                    runs.finish(folder, gathering.planned(), interrupted=True, times=gathering.times())
                raise
            finally:
                folder.close()
    done = runs.result(runs.finish(folder, gathering.planned(), not complete, gathering.times()), complete)
    done.message = "\n".join(filter(None, [done.message, gathering.disagreement()]))
    return done
