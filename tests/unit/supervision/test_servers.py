"""Goal: a start waits for the servers of plugins as long as they come, not longer, and says where they serve.

Method: workers without processes in each phase, and turns that change them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from commitmq.supervision.console import lines_of
from commitmq.supervision.roster import ProcessSpec
from commitmq.supervision.supervisor import Servers
from commitmq.supervision.worker_process import Phase, WorkerProcess


def worker(name: str, *, listens: bool = True) -> WorkerProcess:
    role = ProcessSpec(f"worker-{name}", "m", 10, essential=False, plugin="p", listens=listens)
    return WorkerProcess(role, Phase.WAITING)


def waited(servers: Servers, turn: Callable[[int], None], *, timeout_s: float = 60, stops_at: int = 100) -> int:
    """How many turns the wait took."""
    turns = 0

    def one(left_ms: float) -> None:
        nonlocal turns
        assert 0 < left_ms <= timeout_s * 1_000
        turns += 1
        assert turns < 50
        turn(turns)

    servers.wait(timeout_s, one, lambda: turns >= stops_at)
    return turns


def test_it_waits_for_servers_only() -> None:
    name_server, broker, other = worker("names"), worker("broker"), worker("other", listens=False)
    servers = Servers([name_server, broker, other])

    def turn(number: int) -> None:
        one = name_server if number < 3 else broker
        one.started_ms, one.phase = 1, Phase.STARTING
        if number in (2, 4):
            one.phase, one.endpoints = Phase.READY, [f"tcp://127.0.0.1:{number}"]

    assert waited(servers, turn) == 4
    assert servers.addresses() == {"names": "tcp://127.0.0.1:2", "broker": "tcp://127.0.0.1:4"}
    assert servers.warnings() == []
    report = {"event": "ready", "store": "/s", "warnings": [], "servers": servers.addresses()}
    assert [line for line, _ in lines_of(report)][1:] == ["names is at 127.0.0.1:2", "broker is at 127.0.0.1:4"]


def test_one_that_dies_is_not_waited_for() -> None:
    broker = worker("broker")

    def turn(number: int) -> None:
        broker.started_ms, broker.phase = 1, (Phase.STARTING if number == 1 else Phase.WAITING)

    servers = Servers([broker])
    assert waited(servers, turn) == 2
    assert servers.addresses() == {}
    assert servers.warnings() == ["the server broker does not serve yet; `commitmq status` shows it"]
    broker.last_error = "CommitMQError: port 7 is taken"
    why = "and is tried again: CommitMQError: port 7 is taken"
    assert servers.warnings() == [f"the server broker does not serve {why}; `commitmq status` shows it"]


@pytest.mark.parametrize(("timeout_s", "stops_at", "turns"), [(0.0, 100, 0), (60.0, 3, 3)])
def test_the_wait_ends(timeout_s: float, stops_at: int, turns: int) -> None:
    assert waited(Servers([worker("broker")]), lambda _: None, timeout_s=timeout_s, stops_at=stops_at) == turns


def test_without_servers_nothing_is_waited_for() -> None:
    servers = Servers([worker("other", listens=False)])
    assert waited(servers, lambda _: None) == 0
    assert (servers.addresses(), servers.warnings()) == ({}, [])
