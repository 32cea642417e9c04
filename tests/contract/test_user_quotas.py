"""Goal: a user gets no more of a node than the quotas allow, and other users lose nothing by one who takes all there is.

Method: a real node with keys and users, quotas that are set while it runs, and requests of several users at the same time,
over both protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import commitmq
from commitmq import Message, ProtocolError, SendError
from commitmq.protocol.channel import Channel
from commitmq.protocol.node_address import load_profile
from commitmq.security.policy import ACCESS_KEY, SIGNATURE, sign
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from keyed_node import KeyedNode, keyed
from nodes import eventually, free_port
from rocketmq_peer import connected, pull, send

pytestmark = pytest.mark.timeout(120)
RATE = 50
PATIENCE_S = 5
USERS = ("greedy", "modest", "maker", "many", "both")
ACTIONS = "Pub,Sub,Create,Update,Delete,Get"


class Shared(KeyedNode):
    """A node with keys that serves RocketMQ's clients too, and secrets of its users."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        super().__init__(
            folder,
            "topics.default_queues=1",
            "reader.count=1",
            "plugins.rocketmq.enable=true",
            "plugins.rocketmq.vip_port=false",
            "plugins.rocketmq.namesrv_port=0",
            f"network.store_port={self.port}",
        )
        self.secrets: dict[str, str] = {}

    def quota(self, user: str, *quotas: str) -> None:
        self.store("user", "alter", user, *(part for one in quotas for part in ("--quota", one)))
        time.sleep(1.5)  # a running node knows it within about a second

    def connect(self, user: str) -> commitmq.Connection:
        return commitmq.connect(f"commitmq://{self.host_port}", profile=user)

    def channel(self, user: str, role: str) -> Channel:
        return Channel(self.node.endpoints()[role], keys=load_profile(user))

    def signed(self, user: str, asked: Command) -> Command:
        fields = {**asked.ext_fields, ACCESS_KEY: user}
        return request(
            RequestCode(asked.code),
            {**fields, SIGNATURE: sign(fields, bytes(asked.body), self.secrets[user])},
            asked.body,
        )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with keyed(Shared(tmp_path_factory.mktemp("quotas"))) as found:
        found.add("root", "--super")
        for name in USERS:
            found.add(name)
            for resource in ("Topic:*", "Group:*"):
                found.store("acl", "allow", name, resource, ACTIONS)
        for name in ("modest", "both"):
            found.secrets[name] = orjson.loads(found.store("user", "alter", name, "--new-secret", "--json"))["secret"]
        with found.connect("root") as connection:
            connection.admin().topic_create("orders", queues=1)
            with connection.producer() as producer:
                producer.send_batch("orders", [Message(b"x")] * 400)
        yield found


def _send(shared: Shared, user: str, seconds: float, counts: dict[str, int]) -> None:
    with shared.connect(user) as connection, connection.producer(timeout_s=0.2, ack="memory") as producer:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                producer.send_batch("orders", [Message(b"x")] * 5)
            except SendError as error:
                assert f"user '{user}' is over its rate of {RATE} messages/s ([flow])" in str(error), error
            else:
                counts[user] = counts.get(user, 0) + 5


def test_a_rate_of_one_user_bounds_all_its_connections_and_nobody_else(shared: Shared) -> None:
    shown = shared.store("user", "alter", "greedy", "--quota", f"send_messages_per_s={RATE}")
    assert f"quotas: send_messages_per_s={RATE}" in shown
    assert f"send_messages_per_s={RATE}" in shared.store("user", "list")
    time.sleep(1.5)
    counts: dict[str, int] = {}
    users = ("greedy", "greedy", "greedy", "modest")
    threads = [threading.Thread(target=_send, args=(shared, user, 3.0, counts)) for user in users]
    began = time.monotonic()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    # The bucket of a second, and what came into it since; each send may take the bucket below zero.
    assert RATE <= counts["greedy"] <= RATE * (1 + time.monotonic() - began) + 15
    assert counts["modest"] > counts["greedy"]
    shared.store("user", "alter", "greedy", "--quota", "send_messages_per_s=default")

    def passes() -> bool:
        with shared.connect("greedy") as connection, connection.producer(timeout_s=1, ack="memory") as producer:
            for _ in range(20):
                producer.send_batch("orders", [Message(b"x")] * 20)
        return True

    eventually(passes, "the quota to be gone", PATIENCE_S)


def test_a_user_over_its_pull_rate_is_refused_and_another_one_reads_on(shared: Shared) -> None:
    shared.quota("greedy", "pull_messages_per_s=100")
    fields = {"topic": "orders", "queue": 0, "offset": 0, "max_messages": 150}
    one, other, modest = (shared.channel(user, "reader-0") for user in ("greedy", "greedy", "modest"))
    assert one.request("pull", fields, timeout_s=5)[0]["count"] == 150
    with pytest.raises(ProtocolError, match=r"user 'greedy' is over its rate of 100 messages/s") as refused:
        other.request("pull", fields, timeout_s=5)
    assert refused.value.code == "SYSTEM_BUSY"
    assert 0 < (refused.value.retry_after_ms or 0) <= 1_100
    for _ in range(3):
        assert modest.request("pull", fields, timeout_s=5)[0]["count"] == 150
    for channel in (one, other, modest):
        channel.close()


def test_a_user_makes_no_more_topics_and_groups_than_the_quota(shared: Shared) -> None:
    shared.quota("maker", "topics=2", "groups=1")
    with shared.connect("maker") as connection, shared.connect("modest") as other:
        admin = connection.admin()
        admin.topic_create("made-1", queues=1)
        with connection.producer(timeout_s=3) as producer:
            producer.send("made-2", b"x")
            with pytest.raises(SendError, match=r"user maker has made 2 topics"):
                producer.send("made-3", b"x")
        with pytest.raises(ProtocolError, match=r"LIMIT_EXCEEDED"):
            admin.topic_create("made-3", queues=1)
        other.admin().topic_create("others-1", queues=1)
        admin.topic_delete("made-1")
        admin.topic_create("made-3", queues=1)
        with connection.consumer("orders", group="first"), other.consumer("orders", group="others"):
            with pytest.raises(ProtocolError, match=r"user maker has made 1 groups"):
                connection.consumer("orders", group="second")
            with pytest.raises(ProtocolError, match=r"LIMIT_EXCEEDED"):
                connection.share_consumer("orders", group="third").receive()


def test_a_user_has_no_more_connections_than_the_quota(shared: Shared) -> None:
    shared.quota("many", "connections=2")
    with contextlib.ExitStack() as opened:

        def channel(user: str) -> Channel:
            return opened.enter_context(contextlib.closing(shared.channel(user, "writer")))

        held, modest = [channel("many") for _ in range(3)], channel("modest")

        def refusal() -> ProtocolError | None:
            for one in held:
                try:
                    assert one.request("hello", {}, timeout_s=5)[0]["ok"]
                except ProtocolError as error:
                    held.remove(one)
                    return error
            return None

        # The first requests of a connection may be quicker than the gate, which counts it.
        refused: ProtocolError = eventually(refusal, "one of three connections is refused", PATIENCE_S)
        assert "user many has 2 connections here, the most" in refused.message
        assert (refused.code, refused.retry_after_ms) == ("SYSTEM_BUSY", 1_000)
        assert modest.request("hello", {}, timeout_s=5)[0]["ok"]
        held.pop().close()

        def gets_in() -> bool:
            try:
                return bool(channel("many").request("hello", {}, timeout_s=2)[0]["ok"])
            except ProtocolError:
                return False

        eventually(gets_in, "another connection to be let in", PATIENCE_S)


def test_nobody_sends_in_the_name_of_another_user(shared: Shared) -> None:
    channel = shared.channel("modest", "writer")
    forged = {"user": "greedy", "protocol": "native", "address": "", "proof": "0" * 64}
    with pytest.raises(ProtocolError, match="only super users") as refused:
        channel.request("send", {"topic": "orders", "queue": 0, "on_behalf_of": forged}, (b"x",), timeout_s=5)
    assert refused.value.code == "NO_PERMISSION"
    channel.close()


def test_both_protocols_count_together_and_other_users_of_rocketmq_go_on(shared: Shared) -> None:
    shared.quota("both", "send_messages_per_s=20", "pull_messages_per_s=20")

    async def talk() -> dict[str, Any]:
        async with connected(shared.port) as one, connected(shared.port) as other, connected(shared.port) as modest:
            asked = [one.ask(shared.signed("both", send("orders", b"x"))) for _ in range(60)]
            await asyncio.gather(*asked)
            flood = [await other.ask(shared.signed("both", send("orders", b"x"))) for _ in range(3)]
            calm = [await modest.ask(shared.signed("modest", send("orders", b"y"))) for _ in range(5)]
            pulls = [await one.ask(shared.signed("both", pull("g", "orders", 0))) for _ in range(3)]
            free = await modest.ask(shared.signed("modest", pull("h", "orders", 0)))
            return {"flood": flood, "calm": calm, "pulls": pulls, "free": free}

    found = asyncio.run(talk())
    assert [one.code for one in found["calm"]] == [0] * 5
    assert [one.code for one in found["flood"]] == [ResponseCode.SYSTEM_BUSY] * 3
    assert "user 'both' is over its rate of 20 messages/s" in str(found["flood"][-1].remark)
    assert found["pulls"][0].code == found["free"].code == 0
    assert found["pulls"][-1].code == ResponseCode.FLOW_CONTROL
    with (
        shared.connect("both") as connection,
        connection.producer(timeout_s=0.05, ack="memory") as producer,
        pytest.raises(SendError, match="user 'both' is over its rate"),
    ):
        producer.send_batch("orders", [Message(b"x")] * 200)
        producer.send_batch("orders", [Message(b"x")])


def test_a_user_of_rocketmq_has_no_more_connections_than_the_quota(shared: Shared) -> None:
    shared.quota("both", "connections=2", "send_messages_per_s=0")

    async def talk() -> tuple[list[int], str, int]:
        async with connected(shared.port) as one, connected(shared.port) as two, connected(shared.port) as three:
            codes = [(await peer.ask(shared.signed("both", send("orders", b"x")))).code for peer in (one, two, one)]
            refused = await three.ask(shared.signed("both", send("orders", b"x")))
            async with connected(shared.port) as modest:
                other = await modest.ask(shared.signed("modest", send("orders", b"x")))
            return [*codes, refused.code], str(refused.remark), other.code

    codes, remark, other = asyncio.run(talk())
    assert codes == [0, 0, 0, ResponseCode.SYSTEM_BUSY]
    assert "user both has 2 connections here, the most ([flow] user_connections)" in remark
    assert other == 0
