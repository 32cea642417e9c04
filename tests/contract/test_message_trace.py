"""Goal: the trace topic tells what became of a message, in RocketMQ's records; a trace never stops or slows a send.

Method: a node, traced clients of every kind, the command, and a client whose trace finds no room.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from click.testing import CliRunner

from commitmq import (
    Admin,
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    ConsumeResult,
    HalfMessage,
    Message,
    Producer,
    TopicNotFoundError,
    TransactionState,
)
from commitmq.cli.trace import trace as show_trace
from commitmq.client.tracing import MAX_ENTRIES, Tracer, trace_messages
from commitmq.semantics import trace
from nodes import Node, commitmq, eventually, start_node

pytestmark = pytest.mark.timeout(120)
ASKING = ("transaction.timeout_ms=300", "transaction.check_interval_ms=300")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("trace"), "topics.default_queues=2", *ASKING) as made:
        yield made


def story(node: Node, message_id: str) -> list[dict[str, object]]:
    ended = CliRunner().invoke(show_trace, [message_id, "--json", "--node", node.address])
    records: list[dict[str, object]] = json.loads(ended.stdout)["records"]
    assert ended.exit_code == (0 if records else 1), ended.output
    return records


@pytest.mark.parametrize("kind", ["send", "send_async", "send_batch", "send_batch_async", "asyncio"])
def test_a_producer_tells_of_every_message_that_was_stored(node: Node, kind: str) -> None:
    topic = f"traced-{kind}"
    fields = {"tags": "TagA", "keys": ["k1"]}
    messages = [Message(b"x" * size, **fields) for size in (10, 200, 3_000)]  # type: ignore[arg-type]
    if kind == "asyncio":
        ids = asyncio.run(_sent_by_asyncio(node, topic, messages))
    else:
        with Producer(node.address, trace=True) as producer:
            if kind == "send":
                results = [producer.send(topic, one) for one in messages]
            elif kind == "send_async":
                results = [one.result() for one in [producer.send_async(topic, one) for one in messages]]
            elif kind == "send_batch":
                results = list(producer.send_batch(topic, messages))
            else:
                results = list(producer.send_batch_async(topic, messages).result())
        ids = [(one.unique_id, one.msg_id) for one in results]
    for (unique_id, message_id), message in zip(ids, messages, strict=True):
        (record,) = story(node, unique_id)
        assert record["record"] == "Pub"
        assert (record["topic"], record["tags"], record["keys"]) == (topic, "TagA", "k1")
        assert (record["body_bytes"], record["offset_message_id"]) == (len(message.body), message_id)
        assert record["success"] is True
        assert 0 <= record["cost_ms"] < 10_000  # type: ignore[operator]
        assert story(node, message_id) == [record]  # found by the offset message id as well


async def _sent_by_asyncio(node: Node, topic: str, messages: list[Message]) -> list[tuple[str, str]]:
    async with AsyncProducer(node.address, trace=True) as producer:
        results = [await producer.send(topic, one) for one in messages]
    return [(one.unique_id, one.msg_id) for one in results]


def test_a_producer_tells_its_group(node: Node) -> None:
    with Producer(node.address, group="named", trace=True) as producer:
        sent = producer.send("told", b"x")
    with Producer(node.address, trace=True) as producer:
        unnamed = producer.send("told", b"x")
    assert [one["group"] for one in story(node, sent.unique_id)] == ["named"]
    assert [one["group"] for one in story(node, unnamed.unique_id)] == ["DEFAULT_PRODUCER"]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_id_without_a_trace_is_a_failure(node: Node, form: list[str]) -> None:
    with Producer(node.address, trace=True) as producer:
        producer.send("told", b"x")
    ended = CliRunner().invoke(show_trace, ["nonsense", "--node", node.address, *form])
    assert ended.exit_code == 1
    assert "no trace for nonsense" in ended.stderr
    assert "trace=True" in ended.stderr
    assert (json.loads(ended.stdout)["records"] == []) if form else ended.stdout == ""


def test_handlers_tell_of_each_call_and_of_its_end(node: Node) -> None:
    with Producer(node.address) as producer:
        sent = producer.send("handled", b"once more", keys="order-7")
    consumer = Consumer("handled", group="kitchen", node=node.address, start="earliest")
    tries: list[int] = []

    def handler(message: Message) -> ConsumeResult | None:
        tries.append(message.reconsume_times)
        if len(tries) == 1:
            raise RuntimeError("not yet")
        if len(tries) == 2:
            return ConsumeResult.RETRY
        consumer.close()
        return None

    consumer.run(handler, trace=True, backoff=1, on_error=lambda message, error: None)
    records = story(node, sent.unique_id)
    before = [one for one in records if one["record"] == "SubBefore"]
    after = [one for one in records if one["record"] == "SubAfter"]
    assert [one["retry_times"] for one in before] == tries == [0, 1, 2]
    assert [one["request_id"] for one in before] == [one["request_id"] for one in after]
    assert [one["result"] for one in after] == [2, 4, 0]
    assert {one["group"] for one in records} == {"kitchen"}
    shown = commitmq("trace", sent.unique_id, "--node", node.address).stdout
    assert "exception" in shown
    assert "retry_times=2" in shown


def test_handlers_of_asyncio_are_traced(node: Node) -> None:
    with Producer(node.address, trace=True) as producer:
        sent = producer.send("awaited", b"x")

    async def consume() -> None:
        async with AsyncConsumer("awaited", group="readers", node=node.address, start="earliest") as consumer:

            async def handler(message: Message) -> None:
                await consumer.close()

            await consumer.run(handler, trace=True)

    asyncio.run(consume())
    assert [one["record"] for one in story(node, sent.unique_id)] == ["Pub", "SubBefore", "SubAfter"]


def test_the_ends_of_transactions_are_traced(node: Node) -> None:
    def ends(unique_id: str) -> list[tuple[object, ...]]:
        found = [one for one in story(node, unique_id) if one["record"] == "EndTransaction"]
        names = ("state", "from_check", "group", "topic", "tags", "keys", "message_type", "transaction_id")
        return [tuple(one[name] for name in names) for one in found]

    def check(message: HalfMessage) -> TransactionState:
        return TransactionState.COMMIT

    fields: dict[str, Any] = {"tags": "TagA", "keys": ["k1"]}
    told = ("payers", "paid", "TagA", "k1", 2)
    with Producer(node.address, trace=True, group="payers", transaction_listener=check) as producer:
        with producer.transaction("paid", b"1", **fields) as committed:
            pass
        with producer.transaction("paid", Message(b"2", **fields)) as rolled_back:
            rolled_back.rollback()
        with producer.transaction("paid", b"3", **fields) as later:
            later.unknown()
        eventually(lambda: len(ends(later.unique_id)) == 2, "the node has asked")
    assert ends(committed.unique_id) == [("COMMIT_MESSAGE", False, *told, committed.unique_id)]
    assert ends(rolled_back.unique_id) == [("ROLLBACK_MESSAGE", False, *told, rolled_back.unique_id)]
    assert sorted(ends(later.unique_id)) == [
        ("COMMIT_MESSAGE", True, *told, later.unique_id),
        ("UNKNOW", False, *told, later.unique_id),
    ]
    (half,) = (one for one in story(node, committed.unique_id) if one["record"] == "Pub")
    assert half["message_type"] == trace.MessageType.HALF
    assert "state=COMMIT_MESSAGE" in commitmq("trace", committed.unique_id, "--node", node.address).stdout


def test_the_end_of_a_transaction_of_asyncio_is_traced(node: Node) -> None:
    async def pay() -> str:
        producer = AsyncProducer(node.address, trace=True, group="aio-payers")
        async with producer, producer.transaction("paid", b"4") as transaction:
            pass
        return transaction.unique_id

    assert [one["record"] for one in story(node, asyncio.run(pay()))] == ["Pub", "EndTransaction"]


def test_a_trace_is_not_traced_and_an_untraced_producer_writes_none(node: Node) -> None:
    with Admin(node.address) as admin:
        before = _traces(admin)
        with Producer(node.address) as producer:
            producer.send("untraced", b"x")
        with Producer(node.address, trace=True) as producer:
            producer.send("traced-once", b"x")
        eventually(lambda: _traces(admin) == before + 1, "one trace message is there")
        time.sleep(0.5)
        assert _traces(admin) == before + 1


def _traces(admin: Admin) -> int:
    try:
        return sum(one.max for one in admin.offsets(trace.TRACE_TOPIC))
    except TopicNotFoundError:  # the first trace makes it
        return 0


def test_a_trace_without_room_is_dropped_and_counted_and_never_waits() -> None:
    tracer = Tracer(partial(Producer, "tcp://127.0.0.1:9"))  # no node
    began = time.monotonic()
    for _ in range(3 * MAX_ENTRIES):
        tracer.stored("t", {"op": "send", "properties": {}}, b"x" * 100, {"msg_id": ""}, began)
    assert time.monotonic() - began < 2
    assert tracer.dropped >= MAX_ENTRIES
    tracer.close(0)


def test_trace_messages_have_at_most_ten_records_and_their_keys() -> None:
    records = [
        trace.RecallTrace(timestamp=1, region=None, group=None, topic="t", message_id=f"id-{n}", success=True)
        for n in range(25)
    ]
    broken = trace.RecallTrace(timestamp=1, region="a\x01b", group=None, topic="t", message_id="x", success=True)
    messages = list(trace_messages(iter([*records, broken])))
    assert [len(trace.decode_trace(one.body)) for one in messages] == [10, 10, 5]
    assert set(messages[2].keys) == {f"id-{n}" for n in range(20, 25)}
