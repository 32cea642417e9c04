"""Goal: systemd hears that the node is ready, busy, stopping and alive, in its own words, and can never hold the node up.

Method: a socket of the test's own is the service manager. It reads every datagram, fills up, goes away and comes back.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq.supervision.supervisor import ServiceManager

READY = {"event": "ready", "admin": ["tcp://127.0.0.1:7310"], "warnings": [], "store": "s"}


class Manager:
    """The receiving end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.socket.setblocking(False)

    def heard(self) -> list[list[str]]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.socket.recv(65536).decode().split("\n"))
        return found


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.socket.close()


def test_ready_says_where(manager: Manager) -> None:
    told: list[object] = []
    report = ServiceManager({"NOTIFY_SOCKET": manager.address}).listening_to(told.append)
    report({"event": "info", "message": "recovery: checking the log,\n45 %"})
    report(READY)
    assert manager.heard() == [
        ["STATUS=recovery: checking the log, 45 %"],
        ["READY=1", "STATUS=ready at tcp://127.0.0.1:7310"],
    ]
    assert told[-1] == READY, "the first listener hears it too"


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ({"event": "failed", "error": "no space", "code": 71}, "STATUS=no space"),
        ({"event": "stopped", "clean": True}, "STATUS=stopped; everything written is flushed"),
        ({"event": "stopped", "clean": False}, "STATUS=stopped; not in order, the next start recovers"),
    ],
)
def test_the_end_is_told(manager: Manager, message: dict[str, object], status: str) -> None:
    ServiceManager({"NOTIFY_SOCKET": manager.address}).listening_to(lambda _message: None)(message)
    assert manager.heard() == [[status]]


def test_a_stop_is_told_once(manager: Manager) -> None:
    made = ServiceManager({"NOTIFY_SOCKET": manager.address})
    for now_ms, stopping in ((0, False), (1, True), (2, True)):
        made.turn(now_ms, stopping=stopping)
    assert manager.heard() == [["STOPPING=1", "STATUS=stopping"]]


def test_a_sign_of_life_comes_twice_in_each_interval(manager: Manager) -> None:
    made = ServiceManager({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "7"})
    for now_ms in range(10_000, 14_000, 200):
        made.turn(now_ms, stopping=False)
    assert manager.heard() == [["WATCHDOG=1"]] * 4


def test_without_a_watchdog_an_idle_node_says_nothing(manager: Manager) -> None:
    made = ServiceManager({"NOTIFY_SOCKET": manager.address})
    for now_ms in range(0, 600_000, 200):
        made.turn(now_ms, stopping=False)
    assert manager.heard() == []


def test_the_variables_are_for_the_supervisor_alone(manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "7", "LANG": "C"}
    ServiceManager(environment)
    assert environment == {"LANG": "C"}


def test_a_name_in_the_abstract_space(tmp_path: Path) -> None:
    manager = Manager(f"@commitmq-test-{tmp_path.name}-{id(tmp_path)}")
    ServiceManager({"NOTIFY_SOCKET": manager.address}).listening_to(lambda _message: None)(READY)
    assert manager.heard()[0][0] == "READY=1"
    manager.socket.close()


def test_a_manager_that_is_away_hears_it_later(tmp_path: Path) -> None:
    made = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    made.listening_to(lambda _message: None)(READY)
    made.turn(1, stopping=False)
    manager = Manager(str(tmp_path / "notify"))
    made.turn(2, stopping=False)
    assert manager.heard() == [["READY=1", "STATUS=ready at tcp://127.0.0.1:7310"]]
    made.turn(3, stopping=False)
    assert manager.heard() == [], "once"
    manager.socket.close()


def test_a_manager_that_does_not_read_holds_up_nothing(manager: Manager) -> None:
    made = ServiceManager({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "2000"})
    for now_ms in range(5_000):
        made.turn(now_ms, stopping=False)
    made.listening_to(lambda _message: None)(READY)
    waiting = manager.heard()
    assert 1 < len(waiting) < 5_000
    assert waiting == [["WATCHDOG=1"]] * len(waiting)
    made.turn(5_001, stopping=False)
    assert "READY=1" in manager.heard()[0]


def test_without_a_manager_nothing_is_opened() -> None:
    told: list[object] = []
    made = ServiceManager({"WATCHDOG_USEC": "1000000"})
    assert made.listening_to(told.append) == told.append
    made.turn(5_000, stopping=True)
