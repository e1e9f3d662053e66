"""Two threads take turns through the turnstile as two measuring processes would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from spikemark.harness.turns import LABEL_VARIABLE, VARIABLE, Turn, Turnstile

KEYS = ["x", "y", "z"]
Point = tuple[str, int]


class Log:
    """What ran when; ``busy`` must never be two."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Point]] = []
        self.busy = 0
        self.worst = 0
        self.guard = threading.Lock()


def lane(stile: Turnstile, label: str, points: list[Point], log: Log, leave: bool = True) -> None:
    """Go through ``points``, then hang up."""
    variables = stile.environment(label)
    turn = Turn(variables[VARIABLE], variables[LABEL_VARIABLE])
    for key, burst in points:
        turn.pause(key, burst)
        with log.guard:
            log.busy += 1
            log.worst = max(log.worst, log.busy)
            log.entries.append((label, (key, burst)))
        with log.guard:
            log.busy -= 1
    assert turn._socket is not None
    turn._socket.close()


def together(stile: Turnstile, work: dict[str, list[Point]], log: Log) -> None:
    threads = [threading.Thread(target=lane, args=(stile, label, points, log)) for label, points in work.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "the two wait for each other"


def points(keys: list[str], bursts: int) -> list[Point]:
    return [(key, burst) for key in keys for burst in range(bursts + 1)]


@pytest.fixture
def stile(tmp_path: Path) -> Callable[..., Turnstile]:
    return lambda seed="1": Turnstile(tmp_path, ["base", "new"], KEYS, seed)


def test_each_burst_of_one_lies_next_to_the_same_burst_of_the_other(stile: Callable[..., Turnstile]) -> None:
    log = Log()
    with stile() as gate:
        together(gate, {"base": points(KEYS, 20), "new": points(KEYS, 20)}, log)
    pairs = list(zip(log.entries[::2], log.entries[1::2], strict=True))
    assert len(pairs) == 3 * 21
    assert all(a[1] == b[1] and a[0] != b[0] for a, b in pairs)
    assert log.worst == 1
    first = [a[0] for a, _ in pairs]
    assert 10 < first.count("base") < 53, "who goes first is drawn anew"


def test_one_that_skips_a_case_waits_at_the_next(stile: Callable[..., Turnstile]) -> None:
    """The case failed in ``new``: ``base`` finishes it alone, then both go on side by side."""
    log = Log()
    with stile() as gate:
        together(gate, {"base": points(KEYS, 3), "new": [("x", 0), *points(["y", "z"], 3)]}, log)
    at = log.entries.index(("new", ("y", 0)))
    assert [e for e in log.entries[:at] if e[0] == "base" and e[1][0] == "x"] == [("base", ("x", b)) for b in range(4)]


def test_one_that_dies_is_not_waited_for(stile: Callable[..., Turnstile]) -> None:
    log = Log()
    with stile() as gate:
        together(gate, {"base": points(KEYS, 5), "new": points(["x"], 2)}, log)
    assert [e[1] for e in log.entries if e[0] == "base"] == points(KEYS, 5)


def test_its_successor_takes_part_again(stile: Callable[..., Turnstile]) -> None:
    log = Log()
    with stile() as gate:
        ready = threading.Event()

        def dies_and_returns() -> None:
            lane(gate, "new", [("x", 0)], log)
            ready.wait(20)
            lane(gate, "new", points(["z"], 4), log)

        variables = gate.environment("base")
        second = threading.Thread(target=dies_and_returns)
        second.start()
        turn = Turn(variables[VARIABLE], variables[LABEL_VARIABLE])
        for key, burst in points(["x", "y"], 2):
            turn.pause(key, burst)
        ready.set()
        while not any(e == ("new", ("z", 0)) for e in log.entries):
            # The other may go on only while we wait; we are ahead of it only from here on.
            turn.pause("z", 0)
        for burst in range(1, 5):
            turn.pause("z", burst)
            with log.guard:
                log.entries.append(("base", ("z", burst)))
        assert turn._socket is not None
        turn._socket.close()
        second.join(20)
        assert not second.is_alive()
    assert [e[1][1] for e in log.entries if e[0] == "new" and e[1][0] == "z"] == [0, 1, 2, 3, 4]


def test_one_that_has_nothing_to_do_in_this_pass(stile: Callable[..., Turnstile]) -> None:
    log = Log()
    with stile() as gate:
        gate.leave("new")
        together(gate, {"base": points(KEYS, 1)}, log)
    assert len(log.entries) == 6


def test_waiting_is_known(stile: Callable[..., Turnstile]) -> None:
    """A session must not count the other's time as its worker's."""
    with stile() as gate:
        variables = gate.environment("base")
        turn = Turn(variables[VARIABLE], variables[LABEL_VARIABLE])
        thread = threading.Thread(target=turn.pause, args=("x", 0))
        thread.start()
        while not gate.waiting("base"):
            assert thread.is_alive()
        assert not gate.waiting("new")
        gate.leave("new")
        thread.join(20)
        assert not thread.is_alive()
        assert not gate.waiting("base")


def test_after_an_interrupt_cases_end_and_none_begins(stile: Callable[..., Turnstile]) -> None:
    log = Log()
    gate = stile()
    with gate:
        variables = gate.environment("base")
        turn = Turn(variables[VARIABLE], variables[LABEL_VARIABLE])
        gate.leave("new")
        turn.pause("x", 0)
        gate.finish_cases()
        turn.pause("x", 1)
        thread = threading.Thread(target=turn.pause, args=("y", 0))
        thread.start()
        while not gate.waiting("base"):
            assert thread.is_alive()
    thread.join(20)  # the end of the turnstile frees it
    assert not thread.is_alive()
    assert not turn.shared
    assert not log.entries


def test_nonsense_on_the_socket_harms_nobody(stile: Callable[..., Turnstile]) -> None:
    log = Log()
    with stile() as gate:
        variables = gate.environment("base")
        bad = Turn(variables[VARIABLE], "nobody")
        assert bad._socket is not None
        bad._socket.sendall(b'\xff\x00{"label": 3}\n[1]\n{"key": 1}\n')
        together(gate, {"base": points(KEYS, 2), "new": points(KEYS, 2)}, log)
        bad._socket.close()
    assert len(log.entries) == 18


def test_without_another_pausing_is_nothing() -> None:
    turn = Turn()
    assert not turn.shared
    turn.pause("x")
