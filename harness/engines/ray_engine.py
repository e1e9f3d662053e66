"""Ray as the engine: one exclusive job a kind of node, its rows brought back as they come, a lost node's moved once.

The only module that imports Ray, and that only when it is asked for. A job is an actor bound to one node, with all of
that node's processors and GPUs, so that nothing else of Ray's runs beside it. Ray leaves an actor whose node is gone
pending for ever, so the table of nodes is watched as well as the calls.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from spikemark.harness.engines import kinds, parcel
from spikemark.harness.engines.address import answers, connects, first_line
from spikemark.harness.engines.gathering import Gathering, Part
from spikemark.harness.engines.kinds import Host
from spikemark.harness.engines.node import Node
from spikemark.harness.errors import UsageError
from spikemark.harness.interrupts import TOLD, Interrupts
from spikemark.harness.process import WorkerCommand, one_line
from spikemark.harness.runfolder import StorageError

ANSWER_S, CHECK_S = 5.0, 60.0
LOOK_S, AGAIN_S, CLOSE_S = 0.5, 2.0, 10.0
SILENCE_S, DEATH_S = 60.0, 5.0
"""How long a node that does not answer is asked again (Ray takes up to 30 s to declare one dead), and how long one
whose process is said to be dead may take to be declared so too."""
HEAD_S, WAITING_S = 15.0, 15.0
LOST = "its node was lost"


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to the cluster at ``address`` (default: ``RAY_ADDRESS``, or the one that runs on this machine).

    ``UsageError`` in one line if Ray is not installed or no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--engine ray needs Ray ({error}): pip install 'spikemark[ray]'") from None
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        answers(address)
    # When a node is lost, Ray prints pages of its log to standard output, whatever it is told of logging.
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            here = "start one with `ray start --head`, or name one with --address HOST:PORT"
            raise UsageError(f"no Ray cluster answers: {here if address == 'auto' else first_line(error)}") from None
        except (RuntimeError, ValueError, TimeoutError) as error:  # other versions of Ray or Python, for one
            raise UsageError(one_line(f"cannot join the Ray cluster: {first_line(error)}", 400)) from None
        try:
            yield ray
        except HeadGone:
            raise  # leaving a cluster that is gone would be waited for
        except BaseException:
            ray.shutdown()
            raise
        ray.shutdown()


class HeadGone(UsageError):
    """The cluster's own head does not answer any more."""


class _Running:
    """A part of the run on its node: the actor, the call under way, and how far its journal is known."""

    def __init__(self, part: Part, actor: Any, call: Any, attempt: int) -> None:
        self.part, self.actor, self.call, self.attempt = part, actor, call, attempt
        self.position = 0
        self.begun = self.warned = False
        self.since = self.asked = time.monotonic()
        self.gone_at, self.why = 0.0, ""
        """When it counts as lost unless it answers (0: it does answer), and what is then said."""


class Engine:
    """Has the parts of ``gathering`` measured. ``every``: each node has a part of its own."""

    def __init__(
        self,
        ray: Any,
        gathering: Gathering,
        inputs: parcel.Inputs,
        worker_command: WorkerCommand,
        every: bool,
        interrupts: Interrupts,
    ) -> None:
        self.ray, self.gathering, self.every, self.interrupts = ray, gathering, every, interrupts
        self._inputs, self._command = inputs, worker_command
        self._head = str(ray.get_runtime_context().gcs_address)
        self._contents: list[Any] = []
        self._running: list[_Running] = []
        self._closing: list[Any] = []
        self._used: set[str] = set()
        self._told = False

    def run(self) -> bool:
        """All parts to their ends; whether none was interrupted. ``UsageError`` if the cluster itself fails."""
        try:
            return self._run()
        except self.ray.exceptions.RayError as error:
            raise UsageError(one_line(f"the cluster has failed: {first_line(error)}", 400)) from None

    def _run(self) -> bool:
        self._contents = [self.ray.put(content) for content in self._inputs.contents]
        try:
            for part in list(self.gathering.parts):
                self._start(part, 1)
            while self._running and self.interrupts.count < 2:
                if self.interrupts.count and not self._told:
                    self._stop()
                ready = self._wait()
                self._check_head()
                alive = kinds.hosts(self.ray.nodes())
                for one in list(self._running):
                    if one.call is not None and one.call in ready:
                        self._hear(one)
                    else:
                        self._watch(one, alive)
            if self._closing and self.interrupts.count < 2:
                self.ray.wait(self._closing, num_returns=len(self._closing), timeout=CLOSE_S)
        except HeadGone:
            raise
        except BaseException:
            self._kill()
            raise
        self._kill()
        return not self.interrupts.count

    def _kill(self) -> None:
        for one in self._running:
            self.ray.kill(one.actor)

    def _check_head(self) -> None:
        """Ask before Ray does: Ray would wait for it, and then end this process with no word of ours."""
        since = time.monotonic()
        while why := connects(self._head):
            if time.monotonic() - since > HEAD_S:
                raise HeadGone(f"the head of the cluster does not answer any more ({why}): continue with --resume")
            time.sleep(LOOK_S)

    def _wait(self) -> list[Any]:
        """Calls that have been answered; comes back after a moment in any case."""
        calls = [one.call for one in self._running if one.call is not None]
        if not calls:
            time.sleep(LOOK_S)
            return []
        answered: list[Any] = self.ray.wait(calls, num_returns=1, timeout=LOOK_S)[0]
        return answered

    def _start(self, part: Part, attempt: int) -> None:
        """Ask for the part's node as a whole, and for the part to be measured there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        job, host = part.job, part.job.host
        options = {
            "num_cpus": host.resources.get("CPU", 0),
            "num_gpus": host.resources.get("GPU", 0),
            "resources": {job.kind: host.resources[job.kind]} if job.kind in host.others else {},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(host.id, soft=False),
            "max_restarts": 0,
        }
        actor = self.ray.remote(Node).options(**options).remote()
        node = {"kind": kinds.plain(job.kind), "id": host.short}
        known = self.gathering.known(part)
        letter = parcel.pack(list(part.cases.values()), part.options, self._inputs, self._command, node, known)
        self._used.add(host.id)
        self._running.append(_Running(part, actor, actor.begin.remote(letter, *self._contents), attempt))

    def _hear(self, one: _Running) -> None:
        """A call has been answered: by news, or by the reason why there are none."""
        errors, call, one.call = self.ray.exceptions, one.call, None
        try:
            news = self.ray.get(call)
        except errors.RayTaskError as error:  # raised by our own code there: a full disk, for one
            cause = error.cause if isinstance(error.cause, BaseException) else error
            self._end(one, one_line(first_line(cause)))
        except errors.ActorUnavailableError:
            self._silent(one, SILENCE_S, "its node does not answer")
        except errors.RayError as error:
            self._silent(one, DEATH_S, _said(error) or "its process there has ended")
        else:
            one.begun, one.gone_at = True, 0.0
            self._understand(one, json.loads(news) if news else {"position": 0, "ended": None})

    def _understand(self, one: _Running, news: dict[str, Any]) -> None:
        """Write news down and ask for more, unless the part has come to its end."""
        if "lines" in news:
            try:
                self.gathering.hear(one.part, news)
            except StorageError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self._end(one, f"it sent what cannot be understood ({type(error).__name__})")
                return
        one.position = news["position"]
        if news["ended"] is None:
            self._ask(one)
        else:
            self._end(one, str(news["ended"]["message"]))

    def _ask(self, one: _Running) -> None:
        one.call, one.asked = one.actor.poll.remote(one.position), time.monotonic()

    def _silent(self, one: _Running, seconds: float, why: str) -> None:
        if not one.gone_at:
            one.gone_at, one.why = time.monotonic() + seconds, why

    def _watch(self, one: _Running, alive: list[Host]) -> None:
        """Nothing has been heard of it for a moment."""
        now = time.monotonic()
        if all(host.id != one.part.job.host.id for host in alive):
            self._again(one, LOST, alive)
        elif one.gone_at and now > one.gone_at:
            self._again(one, one.why, alive)
        elif one.gone_at and one.call is None and one.begun and now - one.asked > AGAIN_S:
            self._ask(one)
        elif not one.begun and not one.warned and now - one.since > WAITING_S:
            one.warned = True
            self.gathering.progress.message(f"{one.part.label}: waiting for others to leave the node")

    def _again(self, one: _Running, why: str, alive: list[Host]) -> None:
        """Once, another node of the kind takes over; then what is missing gets rows that say why."""
        self._running.remove(one)
        self.ray.kill(one.actor)
        part, own = one.part, one.part.job.host.id
        job = kinds.another(part.job, alive, self._used if self.every else {own}) if one.attempt == 1 else None
        if self.interrupts.count:
            return
        if job is None:
            more = " (tried twice)" if one.attempt > 1 else f", and no other node of kind {part.job.kind} is left"
            self.gathering.give_up(part, why + more)
            return
        moved = self.gathering.move(part, job, why)
        self.gathering.progress.message(f"{part.label}: {why}, {moved.label} takes over")
        self._start(moved, one.attempt + 1)

    def _end(self, one: _Running, failure: str) -> None:
        """The part is done, or has failed in a way that another node would share."""
        self._running.remove(one)
        self._closing.append(one.actor.close.remote())
        if not self.interrupts.count:
            self.gathering.end(one.part, failure)

    def _stop(self) -> None:
        """Have every node finish its case and stop."""
        self._told = True
        self.gathering.progress.message(TOLD)
        for one in list(self._running):
            if one.begun:
                one.actor.stop.remote()
            else:
                self._running.remove(one)
                self.ray.kill(one.actor)


def _said(error: BaseException) -> str:
    """The error that a process there ended with, if Ray tells it; nothing of Ray's own words, which name machines."""
    found = re.findall(r"^\w*(?:Error|Exception): .+$", str(error), re.MULTILINE)
    return one_line(found[-1]) if found else ""
