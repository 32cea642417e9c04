"""Goal: single requests have RocketMQ's answers where its integration tests look closely: recalls, notifications, queues of
batches, numbers of queues, TLS.

Method: a real node with no settings but its ports, spoken to by the frames of the protocol.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from commitmq import Admin, Reader
from commitmq.format.record import decode_record
from commitmq.semantics.timer import RecallHandle
from commitmq.testing.node_process import eventually, run_commitmq
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import load_object
from commitmq_plugins.rocketmq.remoting.frame import Command, PeerGoneError, request
from nodes import Node, free_port
from rocketmq_client import PULL, SEND, ask, send, served
from rocketmq_peer import records


class Served(NamedTuple):
    node: Node
    port: int
    namesrv: int


@contextmanager
def serving(store: Path, *settings: str) -> Iterator[Served]:
    port, namesrv = free_port(), free_port()
    node = Node(
        store,
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv_port={namesrv}",
        f"network.store_port={port}",
        *settings,
    )
    assert node.start().returncode == 0
    try:
        yield Served(node, port, namesrv)
    finally:
        node.end()


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("rocketmq") / "store") as found:
        served(found.port)
        yield found


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# ---------------------------------------------------------------- recalls


def test_a_recall_means_the_message_of_its_topic(at: Served) -> None:
    """Two topics have a message of one unique key and one time. (RocketMQ does so with appendTopicForTimerDeleteKey.)"""
    due = now_ms() + 5_000

    async def talk(client: RemotingClient) -> tuple[int, list[Command]]:
        await send(client, b"makes the topic", "FIRST", b="letters")
        sent = [
            await send(client, f"to {topic}".encode(), "SAME", f"TIMER_DELIVER_MS\x01{due}\x02", b=topic)
            for topic in ("letters", "parcels")
        ]
        fields = {"producerGroup": "pg", "topic": "letters", "recallHandle": sent[1].ext_fields["recallHandle"]}
        wrong = await client.request(request(RequestCode.RECALL_MESSAGE, fields))
        handle = RecallHandle.decode(sent[1].ext_fields["recallHandle"])._replace(topic="letters")
        fields["recallHandle"] = handle.encode()
        return wrong.code, [await client.request(request(RequestCode.RECALL_MESSAGE, fields))]

    wrong, answers = ask(at.port, talk)
    assert wrong == ResponseCode.ILLEGAL_OPERATION, "the handle is one of another topic"
    assert [(one.code, one.ext_fields["msgId"]) for one in answers] == [(0, "SAME")]

    def listed() -> list[str]:
        with Admin(at.node.address) as admin:
            return [one.topic for one in admin.delayed() if one.unique_id == "SAME"]

    eventually(lambda: listed() == ["parcels"], "only the other one waits")
    bodies: list[bytes] = []
    with Reader("parcels", node=at.node.address) as reader:
        for batch in reader:
            bodies += [message.body for message in batch]
            if bodies:
                break
    assert (bodies, now_ms() >= due) == ([b"to parcels"], True)
    letters = request(RequestCode.GET_MAX_OFFSET, {"topic": "letters", "queueId": "0"})
    answer = ask(at.port, lambda client: client.request(letters))
    assert answer.ext_fields["offset"] == "1", "the first message only"


# ---------------------------------------------------------------- notifications


def test_a_notification_knows_queues_that_are_received_in_order(at: Served) -> None:
    group = {"consumerGroup": "walkers", "topic": "steps", "queueId": "0", "order": "true"}

    async def notified(client: RemotingClient, attempt: str, poll_ms: int = 0) -> str:
        fields = {**group, "pollTime": str(poll_ms), "bornTime": str(now_ms()), "attemptId": attempt}
        answer = await client.request(request(RequestCode.NOTIFICATION, fields), 20)
        assert answer.code == 0, answer.remark
        return answer.ext_fields["hasMsg"]

    async def talk(client: RemotingClient) -> list[str]:
        await send(client, b"one", "STEP1", b="steps", e="1")  # makes the topic; another queue
        found = [await notified(client, "a1")]
        waiting = asyncio.ensure_future(notified(client, "a1", 15_000))
        await asyncio.sleep(0.1)
        await send(client, b"two", "STEP2", b="steps")
        began = time.monotonic()
        found.append(await waiting)
        assert time.monotonic() - began < 10, "it waits no longer than for the message"
        fields = {**group, "maxMsgNums": "8", "invisibleTime": "60000", "pollTime": "15000", "bornTime": str(now_ms()),
                  "initMode": "0", "attemptId": "a1"}  # fmt: skip
        popped = await client.request(request(RequestCode.POP_MESSAGE, fields), 30)
        assert popped.code == 0, popped.remark
        return [
            *found,
            await notified(client, "a1"),
            await notified(client, "another"),
            await notified(client, "x", 300),
        ]

    assert ask(at.port, talk) == ["false", "true", "true", "false", "false"]


# ---------------------------------------------------------------- priorities


def test_what_has_a_higher_priority_is_popped_first(at: Served) -> None:
    with Admin(at.node.address) as admin:
        admin.topic_create("ranks", 3, attributes={"message.type": "PRIORITY"})

    async def talk(client: RemotingClient) -> tuple[list[str], list[list[bytes]]]:
        queues: list[str] = []
        for priority in ("", "0", "2", "1", "9", "0"):
            more = f"_SYS_MSG_PRIORITY_\x01{priority}\x02" if priority else ""
            answer = await send(client, priority.encode() or b"none", f"RANK{len(queues)}", more, b="ranks")
            queues.append(answer.ext_fields["queueId"])
        fields = {"consumerGroup": "ranked", "topic": "ranks", "queueId": "-1", "maxMsgNums": "32",
                  "invisibleTime": "60000", "pollTime": "15000", "bornTime": str(now_ms()), "initMode": "0"}  # fmt: skip
        popped: list[list[bytes]] = []
        while sum(map(len, popped)) < 6:
            answer = await client.request(request(RequestCode.POP_MESSAGE, fields), 30)
            if answer.code == 0:
                popped.append([record.body for record in records(answer.body)])
        return queues, popped

    queues, popped = ask(at.port, talk)
    assert queues == ["0", "0", "2", "1", "2", "0"]
    assert popped[-1] == [b"2", b"9", b"1", b"none", b"0", b"0"] or len(popped) > 1, "a pop before all were dispatched"
    assert all(batch == sorted(batch, key=[b"2", b"9", b"1", b"none", b"0"].index) for batch in popped)


# ---------------------------------------------------------------- queues of batches


def element(body: bytes) -> bytes:
    properties = b"KEYS\x01k\x02"
    size = 22 + len(body) + len(properties)
    return struct.pack(">iiiii", size, 0, 0, 0, len(body)) + body + struct.pack(">h", len(properties)) + properties


def test_a_batch_that_stays_one_record_has_one_id(at: Served) -> None:
    fields = {"topic": "batches", "defaultTopic": "TBW102", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6",
              "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
              "attributes": "+queue.type=BatchCQ"}  # fmt: skip
    queue = {"topic": "batches", "queueId": "0"}

    async def bounds(client: RemotingClient) -> list[str]:
        codes = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
        return [(await client.request(request(code, queue))).ext_fields["offset"] for code in codes]

    async def talk(client: RemotingClient) -> tuple[Command, Command]:
        assert (await client.request(request(RequestCode.UPDATE_AND_CREATE_TOPIC, fields))).code == 0
        assert await bounds(client) == ["-1", "0"]
        header = {**SEND, "b": "batches", "m": "true", "i": "UNIQ_KEY\x01BATCH\x02"}
        body = b"".join(element(b"%d" % number) for number in range(10))
        sent = await client.request(request(RequestCode.SEND_BATCH_MESSAGE, header, body), 10)
        until = time.monotonic() + 20
        while await bounds(client) != ["0", "10"]:
            assert time.monotonic() < until, "the batch can be read"
            await asyncio.sleep(0.05)
        # From the middle of the batch: the client takes it apart.
        pull = {**PULL, "topic": "batches", "queueOffset": "5"}
        return sent, await client.request(request(RequestCode.PULL_MESSAGE, pull), 10)

    sent, pulled = ask(at.port, talk)
    assert (pulled.code, [pulled.ext_fields[one] for one in ("minOffset", "maxOffset", "nextBeginOffset")]) == (
        0,
        ["0", "10", "10"],
    )
    record = decode_record(bytes(pulled.body))
    assert record.sys_flag & 0xC0 == 0xC0, "an inner batch, which is to be taken apart"
    assert (record.queue_offset, record.total_size) == (0, len(pulled.body))
    assert (sent.code, sent.ext_fields["batchUniqId"], sent.ext_fields["queueOffset"]) == (0, "BATCH", "0")
    assert len(sent.ext_fields["msgId"].split(",")) == 1


# ---------------------------------------------------------------- numbers of queues


def test_a_send_makes_a_topic_of_as_many_queues_as_the_template_allows(at: Served) -> None:
    async def made(client: RemotingClient, asked: str) -> int:
        name = f"made{asked}"
        assert (await send(client, b"x", "K", b=name, d=asked)).code == 0
        answer = await client.request(request(RequestCode.GET_TOPIC_CONFIG, {"topic": name}))
        return int(load_object(answer.body)["writeQueueNums"])

    async def talk(client: RemotingClient) -> list[int]:
        return [await made(client, asked) for asked in ("1", "4", "8", "16")]

    async def template(client: RemotingClient) -> int:
        route = await client.request(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"}))
        return int(load_object(route.body)["queueDatas"][0]["writeQueueNums"])

    assert ask(at.port, talk) == [1, 4, 8, 8]
    assert ask(at.namesrv, template) == 8


# ---------------------------------------------------------------- TLS


BOUND = request(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})
ROUTE = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first handshake waits for the server's certificate, which takes its time on a busy machine."""
    monkeypatch.setattr("commitmq_plugins.rocketmq.remoting.client._CONNECT_S", 30.0)


def code_of(port: int, command: Command, *, tls: bool) -> int:
    return int(ask(port, lambda client: client.request(command, 30), tls=tls).code)


def test_both_servers_speak_tls_without_a_setting(at: Served) -> None:
    assert [code_of(port, one, tls=True) for port, one in ((at.port, BOUND), (at.namesrv, ROUTE))] == [0, 0]
    workers = at.node.store / "commitmq" / "workers"
    for name in ("rocketmq_broker", "rocketmq_namesrv"):
        assert (workers / name / "tls.pem").stat().st_mode & 0o777 == 0o600
    assert code_of(at.port, BOUND, tls=False) == 0


def test_a_node_that_requires_tls_registers_with_itself(tmp_path: Path) -> None:
    with serving(tmp_path / "store", "plugins.rocketmq.tls_mode=enforcing") as at:
        eventually(lambda: code_of(at.namesrv, ROUTE, tls=True) == 0, "the broker is registered")
        assert code_of(at.port, BOUND, tls=True) == 0
        for port in (at.port, at.namesrv):
            with pytest.raises(PeerGoneError):
                code_of(port, BOUND, tls=False)


# ---------------------------------------------------------------- users


def test_the_doctor_signs_its_requests_where_there_are_users(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as at:
        served(at.port)

        def run(*words: str, stdin: str = "") -> tuple[int, str]:
            done = run_commitmq(*words, env=at.node.environment(), stdin=stdin)
            return done.returncode, done.stdout + done.stderr

        def doctor(*words: str, stdin: str = "") -> tuple[int, str]:
            return run("rocketmq", "doctor", f"127.0.0.1:{at.namesrv}", "--write", *words, stdin=stdin)

        code, text = run(
            "user", "add", "root", "--super", "--secret-stdin", "--store", str(at.node.store), stdin="its-secret\n"
        )
        assert code == 0, text
        eventually(lambda: "NO_PERMISSION" in doctor()[1], "the server knows of the user")
        code, text = doctor("--access-key", "root", stdin="another-secret\n")
        assert code == 1
        assert "NO_PERMISSION" in text
        code, text = doctor("--access-key", "root", "--timeout", "20", stdin="its-secret\n")
        assert code == 0, text
        assert doctor("--access-key", "root")[0] == 2, "without a secret it does not begin"


# ---------------------------------------------------------------- statistics


def test_messages_that_are_sent_back_are_counted_where_they_go(at: Served) -> None:
    """RocketMQ's names and keys; the key of a dead letter begins with the owner of an account."""
    wanted = {
        ("SNDBCK_PUT_NUMS", "toys@menders"): 2.0,
        ("SNDBCK2DLQ_TIMES", "null@toys@menders@SEND_BACK_TO_DLQ"): 1.0,
        ("TOPIC_PUT_NUMS", "%RETRY%menders"): 1.0,
    }

    async def talk(client: RemotingClient) -> dict[tuple[str, str], float]:
        for number, level in enumerate((18, -1)):
            answer = await send(client, b"x", f"TOY{number}", b="toys")
            place = str(int(answer.ext_fields["msgId"][16:], 16))
            fields = {"offset": place, "group": "menders", "delayLevel": str(level), "originTopic": "toys",
                      "originMsgId": answer.ext_fields["msgId"], "maxReconsumeTimes": "16"}  # fmt: skip
            assert (await client.request(request(RequestCode.CONSUMER_SEND_MSG_BACK, fields), 10)).code == 0
        found = {}
        for name, key in wanted:
            shown = await client.request(
                request(RequestCode.VIEW_BROKER_STATS_DATA, {"statsName": name, "statsKey": key})
            )
            assert shown.code == 0, shown.remark
            found[name, key] = float(load_object(shown.body)["statsMinute"]["sum"])
        info = load_object((await client.request(request(RequestCode.GET_BROKER_RUNTIME_INFO))).body)["table"]
        assert int(info["putMessageEntireTimeMax"]) >= 0
        assert int(info["putMessageFailedTimes"]) >= 0
        return found

    assert ask(at.port, talk) == wanted
