"""Goal: nobody reads, ends or cancels a message of a topic without rights to it, by naming the message's place in the log.

Method: a real node with keys and users, which serves RocketMQ's clients too. A thief has all rights to the topic ``mine`` and
the group ``thieves``, and knows the places of messages of the topic ``secrets``. It names its own topic, or none.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import commitmq
from commitmq import ProtocolError, Reader
from commitmq.protocol.channel import Channel
from commitmq.protocol.node_address import load_profile
from commitmq.semantics.timer import RecallHandle
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from nodes import eventually
from robbed import Robbed, robbed_node
from rocketmq_peer import connected, heartbeat, is_pulled, pull, records, send

HALF = {"TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": "7F0000010001"}


@pytest.fixture(scope="module")
def robbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robbed]:
    with robbed_node(tmp_path_factory.mktemp("robbed")) as found:
        # These may read everything but the secrets.
        found.add("looker")
        found.add_signer("peeker")
        for name in ("looker", "peeker"):
            found.store("acl", "allow", name, "Topic:*", "Sub,Get")
            found.store("acl", "allow", name, "Group:*", "All")
            found.store("acl", "deny", name, "Topic:secrets", "All")
        yield found


def refused(channel: Channel, op: str, **fields: object) -> str:
    with pytest.raises(ProtocolError) as error:
        channel.request(op, dict(fields), (b"",), timeout_s=10)
    return f"{error.value.code}: {error.value.message}"


def test_the_nodes_own_protocol(robbed: Robbed) -> None:
    with commitmq.Producer(robbed.ipc) as producer:
        secret = producer.send("secrets", b"treasure")
        waiting = producer.send("secrets", b"later", delay=timedelta(seconds=8))
    with commitmq.connect(profile="thief") as connection:
        connection.admin().group_create("thieves")
    channel = Channel(robbed.node.endpoints()["writer"], keys=load_profile("thief"))
    place = {"queue": 0, "queue_offset": secret.queue_offset, "physical_offset": secret.physical_offset}
    try:
        told = refused(channel, "send_back", group="thieves", topic="secrets", delay_level=1, **place)
        assert "NO_PERMISSION: no entry of user thief allows Sub on Topic:secrets" in told
        told = refused(channel, "send_back", group="thieves", topic="mine", delay_level=1, **place)
        assert "MESSAGE_ILLEGAL" in told
        cancelled = {"physical_offset": waiting.physical_offset, "unique_id": waiting.unique_id}
        assert "Topic:secrets" in refused(channel, "recall", topic="secrets", **cancelled)
        assert "INVALID_PARAMETER: the message belongs to another topic" in refused(
            channel, "recall", topic="mine", **cancelled
        )
    finally:
        channel.close()
    with Reader("secrets", node=robbed.ipc, start="earliest") as reader:
        seen: list[bytes] = []

        def came() -> bool:
            seen.extend(bytes(one.body) for one in reader.poll(0.5))
            return b"later" in seen

        eventually(came, "the message that waited comes", 20)


def test_rocketmqs_protocol(robbed: Robbed) -> None:
    handed: list[Command] = []
    signed = robbed.signed

    def takes(command: Command) -> Command | None:
        if command.code != RequestCode.CONSUME_MESSAGE_DIRECTLY:
            return None
        handed.append(command)
        return command.answer(body=b'{"consumeResult":"CR_SUCCESS"}')

    async def talk() -> None:
        async with connected(robbed.port, takes) as robber, connected(robbed.port) as owner:
            sent = await owner.until(signed(send("secrets", b"treasure"), "owner"))
            message_id = sent.ext_fields["msgId"]
            offset = int(message_id[16:], 16)
            half = await owner.until(signed(send("secrets", b"half", HALF, sys_flag=4), "owner"))
            half_offset = int(half.ext_fields["msgId"][16:], 16)
            await robber.until(signed(heartbeat("10.1.2.3@77", "thieves", "mine")))

            back = {"offset": str(offset), "group": "thieves", "delayLevel": "1", "originTopic": "mine"}
            answer = await robber.ask(signed(request(RequestCode.CONSUMER_SEND_MSG_BACK, back)))
            assert answer.code == ResponseCode.NO_PERMISSION, answer.remark
            assert "allows Sub on Topic:secrets" in str(answer.remark)

            direct = {"consumerGroup": "thieves", "clientId": "10.1.2.3@77", "msgId": message_id, "topic": "mine"}
            answer = await robber.ask(signed(request(RequestCode.CONSUME_MESSAGE_DIRECTLY, direct)))
            assert answer.code == ResponseCode.NO_PERMISSION, answer.remark
            answer = await owner.ask(signed(request(RequestCode.CONSUME_MESSAGE_DIRECTLY, direct), "owner"))
            assert answer.code == 0, answer.remark
            assert len(handed) == 1, "the owner's alone"

            end = {"producerGroup": "pg", "tranStateTableOffset": "0", "commitLogOffset": str(half_offset),
                   "commitOrRollback": "8", "msgId": HALF["UNIQ_KEY"]}  # fmt: skip
            answer = await robber.ask(signed(request(RequestCode.END_TRANSACTION, {**end, "topic": "mine"})), 20)
            assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "The topic wrong")
            answer = await robber.ask(signed(request(RequestCode.END_TRANSACTION, end)), 20)
            assert answer.code == ResponseCode.NO_PERMISSION, answer.remark
            assert "allows Pub on Topic:secrets" in str(answer.remark)
            answer = await robber.ask(signed(request(RequestCode.END_TRANSACTION, {**end, "topic": "secrets"})), 20)
            assert answer.code == ResponseCode.NO_PERMISSION, answer.remark
            answer = await owner.ask(signed(request(RequestCode.END_TRANSACTION, {**end, "topic": "secrets"}), "owner"))
            assert answer.code == 0, answer.remark

            # With its own messages it may all that.
            own = await robber.until(signed(send("mine", b"own")))
            place = int(own.ext_fields["msgId"][16:], 16)
            fields = {**back, "offset": str(place)}
            await robber.until(signed(request(RequestCode.CONSUMER_SEND_MSG_BACK, fields)))
            found = await robber.until(signed(pull("thieves", "mine", 0)), is_pulled)
            assert [bytes(one.body) for one in records(found.body)] == [b"own"]
            answer = await robber.ask(
                signed(request(RequestCode.CONSUME_MESSAGE_DIRECTLY, {**direct, "msgId": own.ext_fields["msgId"]}))
            )
            assert answer.code == 0, answer.remark

    asyncio.run(talk())


def test_an_entry_that_denies_a_topic_holds_for_places(robbed: Robbed) -> None:
    with commitmq.Producer(robbed.ipc) as producer:
        plain = producer.send("secrets", b"treasure")
        waiting = [
            producer.send("secrets", b"later", delay=timedelta(seconds=60)),
            producer.send("secrets", b"at a level", delay_level=5),
        ]
        own = producer.send("mine", b"own")
    with commitmq.connect(profile="looker") as connection, connection.admin() as admin:
        assert bytes(admin.view(own.physical_offset).body) == b"own"
        for one in (plain, *waiting):
            with pytest.raises(ProtocolError, match=r"NO_PERMISSION.*Topic:secrets"):
                admin.view(one.physical_offset)
        connection.admin().group_create("lookers")
        writer = Channel(robbed.node.endpoints()["writer"], keys=load_profile("looker"))
        try:
            place = {"queue": 4, "queue_offset": 0, "physical_offset": waiting[1].physical_offset}
            told = refused(writer, "send_back", group="lookers", topic="SCHEDULE_TOPIC_XXXX", delay_level=1, **place)
            assert "waits in SCHEDULE_TOPIC_XXXX" in told
        finally:
            writer.close()

    async def talk() -> None:
        async with connected(robbed.port) as peeker:

            async def ask(code: RequestCode, **fields: object) -> Command:
                command = request(code, {name: str(value) for name, value in fields.items()})
                robbed.keys["peeker"].sign(command)
                return await peeker.ask(command)

            answer = await ask(RequestCode.VIEW_MESSAGE_BY_ID, offset=own.physical_offset)
            assert answer.code == 0, answer.remark
            host = "7F000001" + f"{robbed.port:08X}"
            for one in (plain, *waiting):
                answer = await ask(RequestCode.VIEW_MESSAGE_BY_ID, offset=one.physical_offset)
                assert (answer.code, answer.body) == (ResponseCode.NO_PERMISSION, b""), answer.remark
                assert "Topic:secrets" in str(answer.remark)
                message_id = f"{host}{one.physical_offset:016X}"
                answer = await ask(
                    RequestCode.CONSUME_MESSAGE_DIRECTLY,
                    consumerGroup="lookers", clientId="1@1", msgId=message_id, topic="mine",
                )  # fmt: skip
                assert answer.code == ResponseCode.NO_PERMISSION, answer.remark
                answer = await ask(
                    RequestCode.CONSUMER_SEND_MSG_BACK,
                    offset=one.physical_offset, group="lookers", delayLevel=1, originTopic="mine",
                )  # fmt: skip
                assert answer.code == ResponseCode.NO_PERMISSION, answer.remark

    asyncio.run(talk())
    denied = robbed.store("audit", "--user", "looker", "--refused", "--resource", "Topic:secrets")
    assert denied.count("view") == 3
    denied = robbed.store("audit", "--user", "peeker", "--refused", "--resource", "Topic:secrets")
    assert [denied.count(one) for one in ("VIEW_MESSAGE_BY_ID", "CONSUME_MESSAGE_DIRECTLY")] == [3, 3]


def test_cancellations(robbed: Robbed) -> None:
    """A cancellation is a message of the thief's own topic. It may name a message of another one."""
    due = int(time.time() * 1000) + 6_000

    def kept(topic: str) -> str:
        with commitmq.Producer(robbed.ipc) as producer:
            sent = producer.send(topic, b"kept", deliver_at=datetime.fromtimestamp(due / 1000, UTC))
        assert sent.unique_id
        return sent.unique_id

    forms = ("secrets+{}", "{}")
    more: tuple[dict[str, str], ...] = ({}, {"REAL_TOPIC": "secrets"}, {"REAL_TOPIC": "secrets", "REAL_QID": "0"})
    ids = [kept("secrets") for _ in range(2)]
    own = [kept("mine") for _ in range(2)]
    channel = Channel(robbed.node.endpoints()["writer"], keys=load_profile("thief"))
    at = {"TIMER_DELIVER_MS": str(due)}
    try:
        for one in ids:
            for form, real in itertools.product(forms, more):
                properties = {"TIMER_DEL_UNIQKEY": form.format(one), "UNIQ_KEY": one, **at, **real}
                channel.request("send", {"topic": "mine", "queue": 0, "properties": properties}, (b"0",), timeout_s=10)
            handle = RecallHandle("mine", "commitmq", due - due % 1000 + 1, f"secrets+{one}").encode()
            channel.request("recall", {"topic": "mine", "handle": handle}, (b"0",), timeout_s=10)
        for one, form in zip(own, ("mine+{}", "{}"), strict=True):
            properties = {"TIMER_DEL_UNIQKEY": form.format(one), "UNIQ_KEY": one, **at}
            channel.request("send", {"topic": "mine", "queue": 0, "properties": properties}, (b"0",), timeout_s=10)
    finally:
        channel.close()

    async def recall() -> None:
        async with connected(robbed.port) as robber:
            for one in ids:
                handle = RecallHandle("mine", "commitmq", due - due % 1000 + 1, f"secrets+{one}").encode()
                fields = {"producerGroup": "pg", "topic": "mine", "recallHandle": handle}
                await robber.until(robbed.signed(request(RequestCode.RECALL_MESSAGE, fields)))

    asyncio.run(recall())
    with commitmq.Admin(robbed.ipc) as admin:
        listed = {one.unique_id for one in admin.delayed()}
    assert listed >= set(ids), "the list judges as the timer does"
    assert listed.isdisjoint(own)
    with Reader(("secrets", "mine"), node=robbed.ipc, start="earliest") as reader:
        seen: set[str] = set()

        def came() -> bool:
            seen.update(one.unique_id or "" for one in reader.poll(0.5))
            return seen >= set(ids)

        eventually(came, "the messages of the other topic come", 20)
        reader.poll(1.0)
    assert seen.isdisjoint(own), "both forms cancel a message of the own topic"
