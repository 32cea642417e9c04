"""Goal: a router with a guard hands on no request that its sender may not ask for, whatever its size, and counts sealed bytes.

Method: a real ROUTER with keys and users in a folder, and peers with and without keys; whole nodes are in
tests/contract/test_node_keys.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from commitmq.config import NodeConfig, load
from commitmq.errors import ConfigError, StoreError
from commitmq.log import get_log
from commitmq.network.guard import make_guard
from commitmq.network.router import open_router
from commitmq.protocol.channel import Channel
from commitmq.protocol.node_address import Profile
from commitmq.security.access_file import AccessFile, AccessTable, parse_local_users
from commitmq.security.node_keys import KeyPair, load_node_keys, make_node_keys
from commitmq.security.policy import Policies, PolicyEntry, Secret, User
from nodes import eventually

SHOP = KeyPair.make()


class Served:
    """A router of the coordinator's kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        keys = make_node_keys(folder)
        AccessFile(folder).change(self._make_user)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        log, config = get_log("test"), NodeConfig()
        guard = make_guard(self.context, config, folder, "coordinator", log, node_key=keys.public)
        self.router, self.endpoints = open_router(
            self.context, config.network, log, f"ipc://{folder}/r.ipc", 0, guard=guard
        )
        self.channels: list[Channel] = []
        self.profile = Profile("shop", "", keys.public, SHOP.public, SHOP.secret.reveal())

    @staticmethod
    def _make_user(table: AccessTable) -> None:
        table.users["shop"] = User("shop", Secret.make(), keys=(SHOP.public,))
        allowed = {"resource": "Topic:orders", "actions": ["Get"], "decision": "Allow"}
        table.policies["shop"] = Policies((PolicyEntry.from_json(allowed),))

    def connect(self, number: int = 0) -> Channel:
        """A connection to the tcp address, or with 1 to that of ipc."""
        channel = Channel(self.endpoints[number], keys=None if number else self.profile)
        channel.socket.setsockopt(zmq.SNDTIMEO, 5_000)
        self.channels.append(channel)
        return channel

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.router.close()
        self.context.destroy(linger=0)

    def taken(self) -> list[dict[str, Any]]:
        """The headers of the requests that come through within a moment."""
        found = []
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            try:
                found.append(orjson.loads(self.router.recv_multipart(zmq.NOBLOCK)[1]))
                end = time.monotonic() + 0.5
            except zmq.Again:
                time.sleep(0.005)  # a long header waits, and the router hands it on at a later call
        return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path)
    yield found
    found.close()


def ask(channel: Channel, number: int, **fields: Any) -> None:
    channel.socket.send(orjson.dumps({"v": 1, "op": "topic.describe", "id": number, **fields}))


@pytest.mark.parametrize("size_bytes", [0, 200_000])
def test_a_request_is_handed_on_only_if_its_sender_may_ask(served: Served, size_bytes: int) -> None:
    channel = served.connect()
    ask(channel, 1, topic="orders", more="x" * size_bytes)
    ask(channel, 2, topic="private", more="x" * size_bytes)
    ask(channel, 3, op="topic.own", more="x" * size_bytes)
    ask(channel, 4, op="no such operation", more="x" * size_bytes)
    assert [one["id"] for one in served.taken()] == [1]
    refused = [orjson.loads(channel.wait(float("inf"))) for _ in range(3)]
    assert [(one["id"], one["code"]) for one in refused] == [(number, "NO_PERMISSION") for number in (2, 3, 4)]


def test_the_nodes_own_account_asks_for_everything_over_ipc(served: Served) -> None:
    channel = served.connect(1)
    ask(channel, 1, op="topic.own")
    assert [one["id"] for one in served.taken()] == [1]


def test_what_curve_adds_to_a_frame_is_no_request_that_waits(served: Served) -> None:
    """Else a connection would be ended after some ten thousand frames."""
    channel = served.connect()
    count = 0
    header = orjson.dumps({"v": 1, "op": "topic.describe", "id": 1, "topic": "orders"})
    for number in range(3_000):
        channel.socket.send_multipart([header, b"x", b"x"])
        if number % 50 == 49:
            count += len([served.router.recv_multipart() for _ in range(50)])
    assert count == 3_000
    [connection] = served.router.gate.peers.values()
    connection.look()
    assert connection.received > 3_000 * (len(header) + 3 * 33), "the kernel counts sealed frames"
    connection.judge(connection.accepted_s, all_taken=True)
    assert connection.pending == 0
    # (The routing id counts too, as without keys, and a short frame has a short head.)
    assert connection.handled - connection.received < 3_000 * (17 + 9 + 3 * 7) + 1_000


def test_who_goes_on_after_a_thousand_refusals_is_ended(served: Served) -> None:
    channel = served.connect()
    for number in range(1_000):
        ask(channel, number, topic="private")
        if number % 50 == 49:
            assert served.router.poll(5_000) or True
            with pytest.raises(zmq.Again):
                while True:
                    served.router.recv_multipart(zmq.NOBLOCK)
    eventually(lambda: served.taken() == [] and served.router.gate.endings.ended["permissions"] == 1, "it is ended")
    assert channel.lost()


def test_keys_are_private_and_never_replaced(served: Served, tmp_path: Path) -> None:
    found = load_node_keys(served.folder)
    assert found is not None
    with pytest.raises(FileExistsError):
        make_node_keys(served.folder)
    assert load_node_keys(served.folder) == found
    assert found.secret.reveal() not in f"{found!r} {found}"
    path = served.folder / "config" / "security" / "node.key"
    path.chmod(0o640)
    with pytest.raises(StoreError, match="chmod 600"):
        load_node_keys(served.folder)
    path.chmod(0o600)
    path.write_text(path.read_text().replace(found.public, found.public[:-1]))
    with pytest.raises(StoreError, match="damaged") as damaged:
        load_node_keys(served.folder)
    assert found.secret.reveal() not in str(damaged.value)
    path.unlink()
    with pytest.raises(StoreError, match="keys are gone"):
        load_node_keys(served.folder)
    with pytest.raises(StoreError, match="keys are gone"):
        make_guard(served.context, load(), served.folder, "reader-0", get_log("test"), node_key=found.public)


def test_a_process_does_not_take_another_key_than_the_nodes(served: Served) -> None:
    # A writer that was started anew took it: the node said that it was ready, and no client got in.
    found = load_node_keys(served.folder)
    assert found is not None
    path = served.folder / "config/security/node.key"
    path.rename(path.with_name("kept"))
    path.with_name("node.key.configured").unlink()
    other = make_node_keys(served.folder)
    assert other.public != found.public
    with pytest.raises(StoreError, match="not those of its start"):
        make_guard(served.context, load(), served.folder, "reader-0", get_log("test"), node_key=found.public)


def test_no_key_belongs_to_two_users() -> None:
    one, two = User("one", Secret.make(), keys=(SHOP.public,)), User("two", Secret.make())
    table = AccessTable({"one": one, "two": two})
    assert AccessTable.from_json(table.to_json()).owner_of(SHOP.public) == one
    table.users["two"] = replace(two, keys=(SHOP.public,))
    with pytest.raises(ValueError, match="the same key"):
        AccessTable.from_json(table.to_json())


@pytest.mark.parametrize("text", ["shop", "=shop", "no-such-account-here=shop", "1001=", "1001=two words"])
def test_a_setting_of_local_users_that_is_none_is_refused(text: str) -> None:
    assert parse_local_users(" 1001=shop ; root=admin;") == {1001: "shop", 0: "admin"}
    with pytest.raises(ConfigError, match="local_users"):
        parse_local_users(text)
