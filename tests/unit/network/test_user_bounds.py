"""Goal: connections and waiting bytes of one user are bounded by the quota, over all its connections, and others lose nothing.

Method: a real ROUTER with keys, two users and quotas; the test is its receiving thread, and takes nothing while bytes pile up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from commitmq.config import NodeConfig
from commitmq.log import get_log
from commitmq.network.guard import CONNECTIONS, PENDING, UserBounds, make_guard
from commitmq.network.router import open_router
from commitmq.protocol.channel import Channel
from commitmq.protocol.node_address import Profile
from commitmq.security.access_file import AccessFile, AccessTable, UserQuotas
from commitmq.security.node_keys import KeyPair, make_node_keys
from commitmq.security.policy import Policies, PolicyEntry, Secret, User
from nodes import eventually

KEYS = {"shop": KeyPair.make(), "cook": KeyPair.make()}
PENDING_BYTES = 400_000


class Bounded:
    """A router of the coordinator's kind; ``quotas`` are those of shop."""

    def __init__(self, folder: Path, **quotas: int) -> None:
        self.node_key = make_node_keys(folder).public

        def make(table: AccessTable) -> None:
            for name, keys in KEYS.items():
                own = tuple(quotas.items()) if name == "shop" else ()
                table.users[name] = User(name, Secret.make(), keys=(keys.public,), quotas=own)
                allowed = {"resource": "Topic:*", "actions": ["Get"], "decision": "Allow"}
                table.policies[name] = Policies((PolicyEntry.from_json(allowed),))

        AccessFile(folder).change(make)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        log, config = get_log("test"), NodeConfig()
        self.refused = 0
        guard = make_guard(self.context, config, folder, "coordinator", log, node_key=self.node_key)
        self.users = UserBounds(UserQuotas(folder, config.flow, log), self._count)
        self.router, self.endpoints = open_router(
            self.context, config.network, log, f"ipc://{folder}/r.ipc", 0, guard=guard, users=self.users
        )
        self.channels: list[Channel] = []

    def _count(self) -> None:
        self.refused += 1

    def connect(self, user: str) -> Channel:
        keys = KEYS[user]
        channel = Channel(self.endpoints[0], keys=Profile(user, "", self.node_key, keys.public, keys.secret.reveal()))
        channel.socket.setsockopt(zmq.SNDTIMEO, 5_000)
        self.channels.append(channel)
        return channel

    def known(self, user: str) -> Channel:
        """A connection whose user the router knows: the first requests may be quicker than the gate."""
        channel, before = self.connect(user), self._known(user)

        def is_known() -> bool:
            assert self.serves(channel, 1)
            return self._known(user) > before or not self.users.quotas.bounds_connections

        eventually(is_known, "the gate knows the connection", 10)
        return channel

    def _known(self, user: str) -> int:
        return sum(one.user == user for one in list(self.router.gate.peers.values()))

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.router.close()
        self.context.destroy(linger=0)

    def take(self, wanted_s: float = 0.3) -> list[int]:
        """Ids of the requests that come through, until none came for a moment."""
        found: list[int] = []
        end = time.monotonic() + wanted_s
        while time.monotonic() < end:
            try:
                found.append(orjson.loads(self.router.recv_multipart(zmq.NOBLOCK)[1])["id"])
                end = time.monotonic() + wanted_s
            except zmq.Again:
                time.sleep(0.005)
        return found

    def serves(self, channel: Channel, number: int) -> bool:
        """Whether a request comes through."""
        ask(channel, number)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            if number in self.take(0.02):
                return True
        return False

    def ended(self, bound: str) -> int:
        return self.router.gate.endings.ended[bound]


@pytest.fixture
def bounded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bounded]:
    found = Bounded(tmp_path, **request.param)
    yield found
    found.close()


def ask(channel: Channel, number: int, size_bytes: int = 0) -> None:
    header = {"v": 1, "op": "topic.describe", "id": number, "topic": "orders"}
    channel.socket.send_multipart([orjson.dumps(header), bytes(size_bytes)])


def answers(channel: Channel, count: int) -> list[dict[str, Any]]:
    return [orjson.loads(channel.wait(time.monotonic() + 10)) for _ in range(count)]


@pytest.mark.parametrize("bounded", [{"connections": 2}], indirect=True)
def test_a_user_has_no_more_connections_than_the_quota(bounded: Bounded) -> None:
    first, second, cook = bounded.known("shop"), bounded.known("shop"), bounded.known("cook")
    third = bounded.connect("shop")
    eventually(lambda: not bounded.serves(third, 3), "the third connection is refused", 5)
    [refused] = answers(third, 1)
    assert (refused["id"], refused["code"], refused["retry_after_ms"]) == (3, "SYSTEM_BUSY", 1_000)
    assert "user shop has 2 connections here" in refused["error"]
    eventually(lambda: bounded.ended(CONNECTIONS) == 1, "the third connection ends", 5)
    assert bounded.refused == 1
    ask(first, 4)
    ask(cook, 5)
    assert sorted(bounded.take()) == [4, 5]
    second.close()
    bounded.channels.remove(second)

    def gets_in() -> bool:
        channel = bounded.connect("shop")
        return bounded.serves(channel, 6) and bounded.serves(channel, 6)

    eventually(gets_in, "another connection may come when one has gone", 10)


@pytest.mark.parametrize("bounded", [{"pending_bytes": PENDING_BYTES}], indirect=True)
def test_a_user_with_too_many_waiting_bytes_is_refused_until_less_wait(bounded: Bounded) -> None:
    shop, other, cook = bounded.known("shop"), bounded.known("shop"), bounded.known("cook")
    for number in range(10, 22):
        ask((shop, other)[number % 2], number, PENDING_BYTES // 8)
    ask(cook, 50, PENDING_BYTES)
    time.sleep(0.5)  # the gate looks meanwhile
    taken = bounded.take(0.2)
    assert 50 in taken, "the other user's request is handled"
    assert bounded.refused > 3
    refused = answers(shop, 1)[0]
    assert (refused["code"], refused["outcome"]) == ("SYSTEM_BUSY", "not_stored")
    assert 0 < refused["retry_after_ms"] <= 100
    assert PENDING in refused["error"]
    assert not bounded.ended(PENDING)
    time.sleep(0.3)
    eventually(lambda: bounded.serves(shop, 60), "the user is served again", 5)


@pytest.mark.parametrize("bounded", [{"pending_bytes": PENDING_BYTES}], indirect=True)
def test_twice_the_quota_ends_the_connection_with_the_most(bounded: Bounded) -> None:
    greedy, modest, cook = bounded.known("shop"), bounded.known("shop"), bounded.known("cook")
    ask(modest, 10, 1_000)
    for number in range(20, 40):
        ask(greedy, number, PENDING_BYTES // 8)
    eventually(lambda: bounded.ended(PENDING), "the connection with the most ends", 5)
    time.sleep(0.3)  # the gate looks meanwhile, and what the ended connection sent still waits
    assert bounded.ended(PENDING) == 1
    bounded.take()
    [refused] = answers(modest, 1)
    assert (refused["id"], refused["code"]) == (10, "SYSTEM_BUSY"), "the user's other connection lives on"
    eventually(lambda: bounded.serves(cook, 70), "the other user is served", 5)
    eventually(lambda: bounded.serves(modest, 80), "and this user", 5)
    assert bounded.ended(PENDING) == 1


@pytest.mark.parametrize("bounded", [{"pending_bytes": PENDING_BYTES}], indirect=True)
def test_connections_that_fill_up_one_after_the_other_end_too(bounded: Bounded) -> None:
    for number, greedy in enumerate([bounded.known("shop") for _ in range(4)], 1):
        for one in range(20):
            ask(greedy, one, PENDING_BYTES // 8)
        eventually(lambda number=number: bounded.ended(PENDING) == number, "each ends", 5)  # type: ignore[misc]


@pytest.mark.parametrize("bounded", [{}], indirect=True)
def test_without_quotas_no_request_costs_a_call_more(bounded: Bounded) -> None:
    channel, router = bounded.known("shop"), bounded.router
    ask(channel, 5)
    assert router.poll(5_000)
    identity, frame, *_ = zmq.Socket.recv_multipart(router, copy=False)
    guard, users = router.guard, router.users
    assert guard is not None

    def calls() -> int:
        count = 0

        def note(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        guard.refusal(frame)  # the users were just looked at
        sys.setprofile(note)
        router.turns_away(guard, identity.bytes, frame)
        sys.setprofile(None)
        return count

    with_bounds = min(calls() for _ in range(5))
    router.users = None
    assert with_bounds == min(calls() for _ in range(5))
    router.users = users
