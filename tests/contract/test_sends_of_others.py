"""Goal: a user writes only to topics that it may send to, and never to a topic whose messages the node obeys.

Method: a real node with keys and users, which serves RocketMQ's clients too. A thief has all rights to the topic ``mine`` and
the group ``thieves``. It replies and sends to other topics, and to the node's own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import commitmq
from commitmq import ProtocolError, Reader
from commitmq.protocol.channel import Channel
from commitmq.protocol.node_address import load_profile
from commitmq.semantics.reply import reply_topic
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from robbed import Robbed, robbed_node
from rocketmq_peer import SEND, connected, heartbeat, send

REPLIES = reply_topic("DefaultCluster")
REVIVE = "rmq_sys_REVIVE_LOG_DefaultCluster"
OBEYED = (
    REVIVE,
    "rmq_sys_wheel_timer",
    "SCHEDULE_TOPIC_XXXX",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
)
LONG = {"producerGroup": "pg", "defaultTopic": "TBW102", "defaultTopicQueueNums": "2", "queueId": "0", "sysFlag": "0",
        "bornTimestamp": "1763800000000", "flag": "0", "reconsumeTimes": "0", "unitMode": "false"}  # fmt: skip


@pytest.fixture(scope="module")
def robbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robbed]:
    with robbed_node(tmp_path_factory.mktemp("robbed")) as found:
        for name in ("sender", "native_sender"):
            found.add(name) if name.startswith("native") else found.add_signer(name)
            found.store("acl", "allow", name, "Topic:*", "Pub")
        with commitmq.ShareConsumer("mine", group="poppers", node=found.ipc) as consumer:
            consumer.receive(wait_s=0.1)  # the process pop makes the revive topic
        yield found


def reply(code: RequestCode, topic: str, properties: dict[str, str], body: bytes = b"forged") -> Command:
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    if code == RequestCode.SEND_REPLY_MESSAGE_V2:
        return request(code, {**SEND, "b": topic, "i": text}, body)
    return request(code, {**LONG, "topic": topic, "properties": text}, body)


def bodies(robbed: Robbed, topic: str) -> list[bytes]:
    with Reader(topic, node=robbed.ipc, start="earliest") as reader:
        return [bytes(one.body) for _ in range(3) for one in reader.poll(0.3)]


def test_a_reply_goes_to_the_reply_topic(robbed: Robbed) -> None:
    signed = robbed.signed

    async def talk() -> None:
        async with connected(robbed.port) as robber, connected(robbed.port) as owner:
            for code in (RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2):
                for more in ({}, {"REPLY_TO_CLIENT": "commitmq@abc@0"}):
                    for topic in ("secrets", "%RETRY%others", "%DLQ%others", *OBEYED):
                        answer = await robber.ask(signed(reply(code, topic, {"UNIQ_KEY": "F1", **more})))
                        assert answer.code == ResponseCode.NO_PERMISSION, (topic, answer.code, answer.remark)
                    for topic in OBEYED:  # whoever sends
                        answer = await owner.ask(signed(reply(code, topic, {"UNIQ_KEY": "F1", **more}), "owner"))
                        assert answer.code == ResponseCode.NO_PERMISSION, (topic, answer.code, answer.remark)
            answer = await robber.ask(
                signed(reply(RequestCode.SEND_REPLY_MESSAGE, "%RETRY%thieves", {"UNIQ_KEY": "F2"}))
            )
            assert answer.code == ResponseCode.NO_PERMISSION, answer.remark
            answer = await robber.ask(
                signed(reply(RequestCode.SEND_REPLY_MESSAGE_V2, "mine", {"UNIQ_KEY": "F2"}, b"to mine"))
            )
            assert "REPLY_TO_CLIENT] is null" in str(answer.remark), "it may send there"
            for code in (RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2):
                to = {"UNIQ_KEY": "F3", "REPLY_TO_CLIENT": "commitmq@abc@0"}
                answer = await robber.ask(signed(reply(code, REPLIES, to, b"a reply")))
                assert answer.code == 0, answer.remark

    asyncio.run(talk())
    assert bodies(robbed, "secrets") == []
    assert bodies(robbed, "mine") == [b"to mine"]
    assert bodies(robbed, REPLIES) == [b"a reply", b"a reply"]
    lines = [json.loads(one) for one in robbed.store("audit", "--user", "robber", "--json").splitlines() if one]
    used = [one for one in lines if one.get("resource") == f"Topic:{REPLIES}"]
    assert {one["op"] for one in used} == {"SEND_REPLY_MESSAGE", "SEND_REPLY_MESSAGE_V2"}, lines


def test_the_topic_that_is_sent_to_is_the_one_whose_rights_count(robbed: Robbed) -> None:
    """Short and long names of a header's fields do not depend on the request's code."""
    signed = robbed.signed
    short, long = {**SEND, "b": "secrets", "i": "UNIQ_KEY\x01G1\x02"}, {**LONG, "topic": "secrets"}

    async def talk() -> None:
        async with connected(robbed.port) as robber:
            for code, fields in (
                (RequestCode.SEND_MESSAGE, {**LONG, **short, "topic": "mine"}),
                (RequestCode.SEND_MESSAGE_V2, {**long, "b": "mine"}),
                (RequestCode.SEND_BATCH_MESSAGE, {**long, "b": "mine"}),
            ):
                answer = await robber.ask(signed(request(code, fields, b"crossed")))
                assert answer.code == ResponseCode.NO_PERMISSION, (code, answer.code, answer.remark)

    asyncio.run(talk())
    assert bodies(robbed, "secrets") == []


def test_topics_that_the_node_obeys_take_no_sends(robbed: Robbed) -> None:
    """A forged check point in the revive topic would show the messages of any topic to a group of the forger's."""
    sender = load_profile("native_sender")
    channel = Channel(robbed.node.endpoints()["writer"], keys=sender)
    now_ms = int(time.time() * 1000)
    delayed: dict[str, Any] = {"TIMER_DELIVER_MS": str(now_ms + 60_000)}
    try:
        for topic in OBEYED:
            for properties in ({}, delayed, {"DELAY": "1"}):
                with pytest.raises(ProtocolError) as error:
                    channel.request(
                        "send", {"topic": topic, "queue": 0, "properties": properties}, (b"x",), timeout_s=10
                    )
                assert error.value.code in ("NO_PERMISSION", "TOPIC_NOT_EXIST"), (topic, error.value)
            for op in ("append", "batch"):
                with pytest.raises(ProtocolError) as error:
                    channel.request(op, {"topic": topic, "queue": 0, "count": 1}, (b"x",), timeout_s=10)
                assert error.value.code in ("NO_PERMISSION", "TOPIC_NOT_EXIST"), (topic, error.value)
        with pytest.raises(ProtocolError, match="system topic"):
            channel.request("send", {"topic": REVIVE, "queue": 0, "properties": {}}, (b"x",), timeout_s=10)
    finally:
        channel.close()

    async def talk() -> None:
        async with connected(robbed.port) as peer:
            for topic in OBEYED:
                short = send(topic, b"x", {"UNIQ_KEY": "H1"})
                batch = request(RequestCode.SEND_BATCH_MESSAGE, {**short.ext_fields, "m": "true"}, b"x")
                for one in (short, request(RequestCode.SEND_MESSAGE, {**LONG, "topic": topic}, b"x"), batch):
                    answer = await peer.ask(robbed.signed(one, "sender"))
                    assert answer.code != 0, topic
                    if topic == REVIVE and one is not batch:
                        assert (answer.code, "system topic" in str(answer.remark)) == (ResponseCode.NO_PERMISSION, True)

    asyncio.run(talk())
    with commitmq.Admin(robbed.ipc) as admin:
        assert [(one.min, one.max) for one in admin.offsets(REVIVE)] == [(0, 0)] * 8


def test_a_reply_goes_to_the_user_who_asked(robbed: Robbed) -> None:
    """A thief takes the client id of another user, before it or after it."""
    signed, pushed = robbed.signed, {name: list[bytes]() for name in ("robber", "owner")}

    def takes(name: str) -> Callable[[Command], Command | None]:
        def take(command: Command) -> Command | None:
            if command.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
                return None
            pushed[name].append(bytes(command.body))
            return command.answer()

        return take

    async def talk(client: str, *beats: str) -> None:
        async with (
            connected(robbed.port, takes("robber")) as robber,
            connected(robbed.port, takes("owner")) as owner,
            connected(robbed.port) as other,
        ):
            peers = {"robber": robber, "owner": owner}
            for name in beats:
                beat = heartbeat(client, "x", producers=("askers",))
                answer = await peers[name].ask(signed(beat, name))
                assert answer.code == 0, answer.remark
            marks = {"CORRELATION_ID": f"of {client}", "REPLY_TO_CLIENT": client, "TTL": "20000"}
            await owner.until(signed(send("secrets", b"a request", {"UNIQ_KEY": f"R{client}", **marks}), "owner"))
            answered = reply(
                RequestCode.SEND_REPLY_MESSAGE_V2, REPLIES, {"UNIQ_KEY": f"A{client}", **marks}, b"private"
            )
            answer = await other.ask(signed(answered, "sender"))
            assert answer.code == 0, answer.remark

    asyncio.run(talk("10.0.0.1@1", "owner", "robber"))
    asyncio.run(talk("10.0.0.1@2", "robber", "owner"))
    assert pushed == {"robber": [], "owner": [b"private", b"private"]}
    log = robbed.node.store.joinpath("commitmq", "node.log").read_text()
    assert log.count("a client has the id of another user's") == 2
