"""Goal: each rule of RocketMQ for retries, dead letters, ordered queues, POP, replies and transactions (spec 12) holds at the
broker's port.

Method: one node, spoken to by the frames of the protocol, with the versions of old and new clients. Each test has topics and
groups of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from commitmq import Admin
from commitmq.format.record import Record
from commitmq.testing.node_process import eventually
from commitmq_plugins.rocketmq.remoting.codes import V3_4_9, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps, load_object
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from nodes import Node
from pop_answers import pop
from rocketmq_peer import (
    SEND,
    Peer,
    asked,
    connected,
    fill,
    has_code,
    heartbeat,
    make_group,
    make_topic,
    pull,
    records,
    send,
    served_node,
)

AT_ONCE = "4"
NOW = "-1"
"""As delay level of a message that is sent back: a dead letter at once."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, int]]:
    with served_node(tmp_path_factory.mktemp("semantics")) as (node, port, _):
        yield node, port


@pytest.fixture
def node(served: tuple[Node, int]) -> Node:
    return served[0]


@pytest.fixture
def port(served: tuple[Node, int]) -> int:
    return served[1]


def record_at(port: int, topic: str, offset: int = 0) -> Record:
    """A message of queue 0, as soon as it can be read."""

    async def talk() -> Command:
        async with connected(port) as peer:
            return await peer.until(pull("looker", topic, offset, sysFlag=AT_ONCE, maxMsgNums="1"), has_code(0))

    return records(asyncio.run(talk()).body)[0]


def send_back(record: Record, group: str, level: str = "18", *, version: int = V3_4_9, **fields: str) -> Command:
    wanted = {"offset": str(record.physical_offset), "group": group, "delayLevel": level, "originTopic": record.topic}
    command = request(RequestCode.CONSUMER_SEND_MSG_BACK, {**wanted, "originMsgId": record.offset_msg_id, **fields})
    command.version = version
    return command


def send_retry(group: str, body: bytes, times: int, *, version: int = V3_4_9, **fields: str) -> Command:
    """A client's own send to its retry topic, after the message could not be sent back."""
    fields = {
        **SEND,
        "b": f"%RETRY%{group}",
        "j": str(times),
        "i": "UNIQ_KEY\x01K\x02RETRY_TOPIC\x01first\x02",
        **fields,
    }
    command = request(RequestCode.SEND_MESSAGE_V2, fields, body)
    command.version = version
    return command


def config_of(topic: str) -> Command:
    return request(RequestCode.GET_TOPIC_CONFIG, {"topic": topic})


def lock(group: str, client: str, topic: str, queues: int, *, unlocks: bool = False) -> Command:
    wanted = [{"topic": topic, "brokerName": "commitmq", "queueId": one} for one in range(queues)]
    body = {"consumerGroup": group, "clientId": client, "onlyThisBroker": False, "mqSet": wanted}
    return request(RequestCode.UNLOCK_BATCH_MQ if unlocks else RequestCode.LOCK_BATCH_MQ, body=dumps(body))


def locked(answer: Command) -> list[int]:
    return sorted(one["queueId"] for one in load_object(answer.body)["lockOKMQSet"])


# ---------------------------------------------------------------- 12.4: retries and dead letters


def test_a_retry_topic_has_the_queues_of_its_group_and_the_permission_6(port: int) -> None:
    fill(port, "failing", b"a")
    record = record_at(port, "failing")
    answers = asked(
        port,
        make_group("wide", retryQueueNums=3),
        send_back(record, "wide"),
        send_back(record, "usual"),
        config_of("%RETRY%wide"),
        config_of("%RETRY%usual"),
    )
    assert [one.code for one in answers] == [0] * 5
    found = [load_object(one.body) for one in answers[3:]]
    assert [(one["readQueueNums"], one["writeQueueNums"], one["perm"]) for one in found] == [(3, 3, 6), (1, 1, 6)]


def test_a_group_whose_retry_queues_became_0_keeps_no_failed_message_though_it_has_its_topics(port: int) -> None:
    fill(port, "dropping", b"first", b"dropped", b"last")
    commands = []
    for number, queues in enumerate((1, 0, 1)):
        back = send_back(record_at(port, "dropping", number), "droppers", NOW)
        commands += [make_group("droppers", retryQueueNums=queues), back]
    assert [one.code for one in asked(port, *commands)] == [0] * 6
    assert [record_at(port, "%DLQ%droppers", one).body for one in range(2)] == [b"first", b"last"]


def test_a_level_below_0_means_a_dead_letter_and_one_above_the_last_level_the_last_one(node: Node, port: int) -> None:
    fill(port, "levels", b"below", b"above", b"many tries")
    below, above, many = (record_at(port, "levels", one) for one in range(3))
    answers = asked(
        port,
        send_back(below, "levels", "-2"),
        send_back(above, "levels", "19", maxReconsumeTimes=str((1 << 31) - 1)),
        send_back(many, "levels", "1000", maxReconsumeTimes="-1"),
    )
    assert [one.code for one in answers] == [0] * 3
    assert [record_at(port, "%DLQ%levels", one).body for one in range(2)] == [b"below", b"many tries"]

    def waiting() -> list[int]:
        with Admin(node.address) as admin:
            return [one.level for one in admin.delayed("%RETRY%levels")]

    eventually(lambda: waiting() == [18], "the other one waits at the last level")


def test_a_dead_letter_has_the_tag_code_of_its_tag_and_a_topic_of_one_queue_with_the_permission_6(port: int) -> None:
    fill(port, "fatal", b"a", properties={"TAGS": "blue", "KEYS": "k"})
    assert asked(port, send_back(record_at(port, "fatal"), "doctors", NOW))[0].code == 0
    letter = record_at(port, "%DLQ%doctors")
    unit, shown, blue, red = asked(
        port,
        request(RequestCode.QUERY_CONSUME_QUEUE, {"topic": "%DLQ%doctors", "queueId": "0", "index": "0", "count": "1"}),
        config_of("%DLQ%doctors"),
        pull("g", "%DLQ%doctors", 0, sysFlag=AT_ONCE, subscription="blue"),
        pull("g", "%DLQ%doctors", 0, sysFlag=AT_ONCE, subscription="red"),
    )
    assert load_object(unit.body)["queueData"][0]["tagsCode"] == 3_027_034  # Java's "blue".hashCode()
    config = load_object(shown.body)
    assert [config[name] for name in ("readQueueNums", "writeQueueNums", "perm")] == [1, 1, 6]
    assert (blue.code, red.code) == (0, ResponseCode.PULL_RETRY_IMMEDIATELY)
    expected = {"TAGS": "blue", "KEYS": "k", "DELAY": "0", "WAIT": "false", "RETRY_TOPIC": "fatal"}
    assert expected.items() <= letter.properties.items()
    assert (letter.body, letter.reconsume_times) == (b"a", 1)


def test_the_limit_of_a_send_back_counts_from_clients_of_version_121_on_and_the_group_s_for_older_ones(
    port: int,
) -> None:
    fill(port, "limited", b"old", b"new", b"group")
    old, new, of_group = (record_at(port, "limited", one) for one in range(3))
    answers = asked(
        port,
        send_back(old, "limits", version=V3_4_9 - 1, maxReconsumeTimes="0"),
        send_back(new, "limits", version=V3_4_9, maxReconsumeTimes="0"),
        make_group("limits", retryMaxTimes=0),
        send_back(of_group, "limits", version=V3_4_9 - 1, maxReconsumeTimes="16"),
    )
    assert [one.code for one in answers] == [0] * 4
    assert [record_at(port, "%DLQ%limits", one).body for one in range(2)] == [b"new", b"group"]


def test_a_send_to_a_retry_topic_is_redirected_above_the_limit_of_its_client_or_of_its_group(port: int) -> None:
    answers = asked(
        port,
        make_group("plain", retryMaxTimes=3),
        send_retry("plain", b"at the limit", 3),
        send_retry("plain", b"above it", 4),
        send_retry("plain", b"own limit", 4, l="4"),
        send_retry("plain", b"above its own", 1, l="0"),
        send_retry("plain", b"old client", 1, l="0", version=V3_4_9 - 1),
    )
    assert [one.code for one in answers] == [0] * 6
    letters = [record_at(port, "%DLQ%plain", one) for one in range(2)]
    assert [one.body for one in letters] == [b"above it", b"above its own"]
    assert {one.properties["DELAY"] for one in letters} == {"-1"}
    assert [record_at(port, "%RETRY%plain", one).body for one in range(3)] == [
        b"at the limit",
        b"own limit",
        b"old client",
    ]


def test_a_send_to_the_retry_topic_of_a_group_that_holds_locks_is_a_dead_letter_at_once(port: int) -> None:
    assert asked(port, make_topic("walk", 1))[0].code == 0
    answers = asked(
        port,
        lock("walkers", "one@1", "walk", 1),
        send_retry("walkers", b"in order", 0),
        lock("walkers", "one@1", "walk", 1, unlocks=True),
        send_retry("walkers", b"in any order", 0),
    )
    assert [one.code for one in answers] == [0] * 4
    assert record_at(port, "%DLQ%walkers").body == b"in order"
    assert record_at(port, "%RETRY%walkers").body == b"in any order"


def test_a_message_that_is_not_there_cannot_go_back(port: int) -> None:
    fill(port, "present", b"a")
    command = send_back(record_at(port, "present"), "nothing")
    command.ext_fields["offset"] = str(1 << 40)
    (answer,) = asked(port, command)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {1 << 40}")


# ---------------------------------------------------------------- 12.5: ordered consumption


def test_a_lock_is_answered_with_the_queues_of_the_client_and_keeps_no_pull_away(port: int) -> None:
    fill(port, "steps", b"a")
    assert asked(port, make_topic("steps", 3))[0].code == 0
    one, two, _, after, pulled = asked(
        port,
        lock("climbers", "one@1", "steps", 2),
        lock("climbers", "two@2", "steps", 3),
        lock("climbers", "one@1", "steps", 1, unlocks=True),
        lock("climbers", "two@2", "steps", 3),
        pull("climbers", "steps", 0, sysFlag=AT_ONCE),  # of a client that has no lock at all
    )
    assert [locked(answer) for answer in (one, two, after)] == [[0, 1], [2], [0, 2]]
    assert pulled.code == 0


# ---------------------------------------------------------------- 12.6: POP


def test_a_pop_of_more_than_32_messages_is_refused_and_one_of_32_is_not(port: int) -> None:
    fill(port, "popped", *(b"%d" % one for one in range(33)))
    assert asked(port, make_topic("popped", 1))[0].code == 0

    async def talk() -> tuple[Command, Command]:
        async with connected(port) as peer:
            return await peer.ask(pop("g", "popped", 0, 33)), await peer.until(pop("g", "popped", 0, 32), has_code(0))

    refused, popped = asyncio.run(talk())
    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert str(refused.remark).endswith("pop message's num is greater than 32")
    assert len(records(popped.body)) == 32


def test_a_pop_of_a_group_that_may_not_consume_has_16(port: int) -> None:
    fill(port, "unpopped", b"a")
    assert asked(port, make_group("fasting", consumeEnable=False))[0].code == 0

    async def talk() -> Command:
        async with connected(port) as peer:
            return await peer.until(pop("fasting", "unpopped", 0, 1), has_code(0, ResponseCode.NO_PERMISSION))

    assert asyncio.run(talk()).code == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize("mode", ["0", "1"])
def test_a_new_group_pops_a_young_queue_from_its_beginning_with_either_init_mode(port: int, mode: str) -> None:
    fill(port, f"begun{mode}", b"a", b"b", b"c")

    async def talk() -> Command:
        async with connected(port) as peer:
            return await peer.until(pop("g", f"begun{mode}", 0, 8, initMode=mode), has_code(0))

    assert [one.body for one in records(asyncio.run(talk()).body)] == [b"a", b"b", b"c"]


# ---------------------------------------------------------------- 12.8: requests and replies


def test_a_reply_is_pushed_to_its_requester_and_stored(port: int) -> None:
    pushed: list[Command] = []

    def take(command: Command) -> Command | None:
        if command.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return None
        command.body = bytes(command.body)
        pushed.append(command)
        return command.answer()

    def reply(to: str) -> Command:
        marks = f"CORRELATION_ID\x01c1\x02REPLY_TO_CLIENT\x01{to}\x02MSG_TYPE\x01reply\x02UNIQ_KEY\x01{to}\x02"
        return request(
            RequestCode.SEND_REPLY_MESSAGE_V2, {**SEND, "b": "DefaultCluster_REPLY_TOPIC", "i": marks}, b"yes"
        )

    async def talk() -> list[Command]:
        async with connected(port, take) as requester, connected(port) as responder:
            assert (await requester.ask(heartbeat("asker@1", "g", producers=("askers",)))).code == 0
            return [await responder.ask(reply(to)) for to in ("asker@1", "nobody@1")]

    found, lost = asyncio.run(talk())
    assert (found.code, len(pushed), bytes(pushed[0].body)) == (0, 1, b"yes")
    stored = record_at(port, "DefaultCluster_REPLY_TOPIC")
    assert (stored.body, stored.offset_msg_id) == (b"yes", found.ext_fields["msgId"])
    assert lost.code == ResponseCode.SYSTEM_ERROR
    assert lost.remark == "push reply message fail, channel of <nobody@1> not found."


# ---------------------------------------------------------------- 12.3: the ends of transactions


async def half(peer: Peer, topic: str, body: bytes = b"money", **properties: str) -> dict[str, str]:
    """Send a half message; the fields by which its transaction is ended."""
    unique = f"{topic}-{body.decode()}"
    marks = {"UNIQ_KEY": unique, "TRAN_MSG": "true", "PGROUP": "bankers", **properties}
    sent = await peer.until(send(topic, body, marks, sys_flag=4))
    place = str(int(sent.ext_fields["msgId"][16:], 16))
    return {"producerGroup": "bankers", "tranStateTableOffset": sent.ext_fields["queueOffset"],
            "commitLogOffset": place, "msgId": unique, "topic": topic}  # fmt: skip


def end(fields: dict[str, str], decision: int, *, from_check: bool = False) -> Command:
    more = {"commitOrRollback": str(decision), "fromTransactionCheck": str(from_check).lower()}
    return request(RequestCode.END_TRANSACTION, {**fields, **more})


@pytest.mark.parametrize("from_check", [False, True])
def test_a_transaction_whose_end_is_unknown_stays_open(port: int, *, from_check: bool) -> None:
    """RocketMQ does not answer such a request, which its clients send one-way; the node does (spec 19)."""
    topic = f"unknown{from_check}"
    assert asked(port, make_topic(topic))[0].code == 0

    async def talk() -> list[int]:
        async with connected(port) as peer:
            codes = []
            for body, decision in ((b"rolled back", 12), (b"committed", 8)):
                fields = await half(peer, topic, body)
                codes += [(await peer.ask(end(fields, one, from_check=from_check))).code for one in (0, decision)]
            return codes

    assert asyncio.run(talk()) == [0] * 4
    assert record_at(port, topic).body == b"committed", "the first message of the topic"


def test_an_end_that_comes_after_the_immunity_has_604_unless_a_check_asked_for_it(port: int) -> None:
    assert asked(port, make_topic("late"))[0].code == 0

    async def talk() -> list[Command]:
        async with connected(port) as peer:  # (The message was born long ago: see SEND.)
            fields = await half(peer, "late", CHECK_IMMUNITY_TIME_IN_SECONDS="1")
            return [await peer.ask(end(fields, decision, from_check=by_check))
                    for decision, by_check in ((8, False), (12, False), (8, True))]  # fmt: skip

    answers = asyncio.run(talk())
    assert [one.code for one in answers] == [ResponseCode.ILLEGAL_OPERATION] * 2 + [0]


@pytest.mark.parametrize(
    ("name", "value"), [("producerGroup", "robbers"), ("tranStateTableOffset", "77"), ("commitLogOffset", "3")]
)
def test_an_end_that_does_not_name_its_half_message_has_1(port: int, name: str, value: str) -> None:
    assert asked(port, make_topic("wrong"))[0].code == 0

    async def talk() -> Command:
        async with connected(port) as peer:
            fields = await half(peer, "wrong")
            return await peer.ask(end({**fields, name: value}, 8))

    assert asyncio.run(talk()).code == ResponseCode.SYSTEM_ERROR


# ---------------------------------------------------------------- 12.9, 12.10: offsets


def test_a_group_that_broadcasts_has_no_offsets_here_but_those_that_it_commits(port: int) -> None:
    fill(port, "aloud", b"a")
    look = {"consumerGroup": "choir", "topic": "aloud", "queueId": "0", "setZeroIfNotFound": "false"}
    *_, found = asked(
        port,
        heartbeat("one@1", "choir", "aloud", model="BROADCASTING"),
        pull("choir", "aloud", 0, sysFlag="0"),
        request(RequestCode.QUERY_CONSUMER_OFFSET, look),
    )
    assert found.code == ResponseCode.QUERY_NOT_FOUND


def test_the_last_offset_that_is_committed_wins(port: int) -> None:
    fill(port, "shared", *(b"%d" % one for one in range(9)))
    place = {"consumerGroup": "writers", "topic": "shared", "queueId": "0"}

    async def talk() -> str:
        async with connected(port) as one, connected(port) as two:
            assert (await one.ask(make_group("writers"))).code == 0
            for peer, offset in ((one, 7), (two, 3), (one, 5), (two, 4)):
                command = request(RequestCode.UPDATE_CONSUMER_OFFSET, {**place, "commitOffset": str(offset)})
                assert (await peer.ask(command)).code == 0
            return (await one.ask(request(RequestCode.QUERY_CONSUMER_OFFSET, place))).ext_fields["offset"]

    assert asyncio.run(talk()) == "4"
