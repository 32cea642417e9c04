"""Goal: what idle clients cost the coordinator hardly grows with their number, and no death leaves a client without its seat.

Method: sessions in the test's own loop, with short times, and a coordinator of the test's that counts the requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from commitmq.errors import ProtocolError
from commitmq.log import get_log
from commitmq_plugins.rocketmq.broker import clients as module
from commitmq_plugins.rocketmq.broker.clients import GroupSessions
from commitmq_plugins.rocketmq.broker.node import SERVICE_NOT_AVAILABLE, NodeClient

TOPICS = frozenset({"orders"})


class Coordinator:
    """Answers as the node's does, as far as sessions look."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.members: dict[tuple[str, str], str] = {}
        self.is_absent = False
        self.assigned: list[list[Any]] = [["orders", 0]]
        self.before_join: Callable[[], None] = lambda: None

    def count(self, op: str) -> int:
        return sum(1 for name, _ in self.asked if name == op)

    async def ask(self, role: str, op: str, **fields: Any) -> dict[str, Any]:
        assert role == "coordinator"
        self.asked.append((op, fields))
        is_absent = self.is_absent
        await asyncio.sleep(0)
        if is_absent:
            raise ProtocolError(SERVICE_NOT_AVAILABLE, "nobody is there")
        if op == "group.join":
            self.before_join()
            self.members[fields["group"], fields["member"]] = fields["instance"]
            return {"generation": 7, "assigned": self.assigned, "revoke": [], "members": []}
        if op == "group.leave":
            self.members.pop((fields["group"], fields["member"]), None)
            return {}
        assert op == "group.heartbeats"
        refused = [
            [index, "UNKNOWN_MEMBER", "who?"]
            for index, one in enumerate(fields["members"])
            if (one["group"], one["member"]) not in self.members
        ]
        return {"changed": [], "refused": refused}


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_S", 0.2)
    monkeypatch.setattr(module, "_STEP_S", 0.05)
    monkeypatch.setattr(module, "_SOON_S", 0.03)


def run(main: Callable[[GroupSessions, Coordinator, Counter[str]], Awaitable[None]]) -> None:
    async def limited() -> None:
        told: Counter[str] = Counter()
        coordinator = Coordinator()
        sessions = GroupSessions(
            cast("NodeClient", coordinator),
            asyncio.get_running_loop(),
            get_log("test"),
            lambda group: told.update([group]),
        )
        async with asyncio.timeout(30):
            await main(sessions, coordinator, told)
            await sessions.close()
            assert coordinator.members == {}, "all left"

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_no_clients_cost_nothing_and_many_are_few_requests() -> None:
    async def main(sessions: GroupSessions, coordinator: Coordinator, told: Counter[str]) -> None:
        assert sessions._timer is None
        for number in range(500):
            sessions.subscribe("readers", f"client@{number}", TOPICS)
        await until(lambda: len(coordinator.members) == 500)
        coordinator.asked.clear()
        await until(lambda: sum(len(one["members"]) for _, one in coordinator.asked) >= 1_000)
        assert coordinator.count("group.heartbeats") == len(coordinator.asked) <= 40
        repeated = [one for _, fields in coordinator.asked for one in fields["members"] if "owned" in one]
        assert len(repeated) == 500, "each names the queues that it was given, once"

    run(main)


def test_a_member_that_the_coordinator_does_not_know_joins_again_with_its_queues() -> None:
    async def main(sessions: GroupSessions, coordinator: Coordinator, told: Counter[str]) -> None:
        sessions.subscribe("readers", "one", TOPICS)
        await until(lambda: ("readers", "one") in coordinator.members)
        coordinator.members.clear()
        coordinator.asked.clear()
        await until(lambda: ("readers", "one") in coordinator.members)
        assert coordinator.asked[-1][1]["owned"] == [["orders", 0]]

    run(main)


def test_an_absent_coordinator_ends_no_membership() -> None:
    async def main(sessions: GroupSessions, coordinator: Coordinator, told: Counter[str]) -> None:
        sessions.subscribe("readers", "one", TOPICS)
        await until(lambda: ("readers", "one") in coordinator.members)
        coordinator.is_absent = True
        coordinator.asked.clear()
        await until(lambda: coordinator.count("group.heartbeats") >= 3)
        session = sessions.get("readers", "one")
        assert session is not None
        assert session.joined
        coordinator.is_absent = False
        coordinator.asked.clear()
        await until(lambda: bool(coordinator.asked))
        assert coordinator.asked[0][1]["members"][0]["owned"] == [["orders", 0]], "what was lost is said again"
        assert coordinator.count("group.join") == 0

    run(main)


def test_other_topics_while_it_joins_are_another_join() -> None:
    async def main(sessions: GroupSessions, coordinator: Coordinator, told: Counter[str]) -> None:
        more = TOPICS | {"parcels"}
        coordinator.before_join = lambda: sessions.subscribe("readers", "one", more)
        sessions.subscribe("readers", "one", TOPICS)
        await until(lambda: coordinator.count("group.join") == 2)
        assert coordinator.asked[-1][1]["topics"] == ["orders", "parcels"]
        await until(lambda: coordinator.count("group.heartbeats") == 1)

    run(main)


def test_a_client_that_goes_while_it_joins_leaves() -> None:
    async def main(sessions: GroupSessions, coordinator: Coordinator, told: Counter[str]) -> None:
        coordinator.before_join = lambda: cast("None", sessions.take_out("readers", "one"))
        sessions.subscribe("readers", "one", TOPICS)
        await until(lambda: coordinator.count("group.leave") == 1)
        assert coordinator.members == {}

    run(main)


def test_clients_are_told_when_their_queues_are_others() -> None:
    async def main(sessions: GroupSessions, coordinator: Coordinator, told: Counter[str]) -> None:
        sessions.subscribe("readers", "one", TOPICS)
        await until(lambda: told["readers"] == 1)
        await until(lambda: coordinator.count("group.heartbeats") == 2)
        assert told == {"readers": 1}

    run(main)
