"""Goal: RocketMQ's own broker goes on with the pending messages that our node leaves, and our node with those that RocketMQ's
broker leaves: none is lost, none comes early.

Method: a real node and a real broker (5.4.0, with its clients) take turns on one store. The one before was stopped in order,
or killed. In the end every message of the log is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broker import Broker
from node_process import NodeProcess, dump

from commitmq import HalfMessage, Producer, ShareConsumer, TransactionState
from nodes import eventually

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(240)]

OpenBroker = Callable[..., Broker]
DELAY_S = 5  # level 2
ENDS = pytest.mark.parametrize("end", ["stop", pytest.param("kill", marks=pytest.mark.long)])


def leave(node: NodeProcess, end: str) -> None:
    """End the node as ``end`` says."""
    (node.stop if end == "stop" else node.kill)()


def stored(root: Path, topic: str) -> list[dict[str, Any]]:
    """Every message of ``topic`` in the log."""
    return [line for line in dump(root) if line["topic"] == topic]


def bodies(lines: list[dict[str, Any]]) -> Counter[bytes]:
    return Counter(bytes.fromhex(line["body_hex"]) for line in lines)


def assert_not_early(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["store_timestamp"] >= line["born_timestamp"] + DELAY_S * 1000 - 1, line


@ENDS
def test_rocketmq_delivers_the_delayed_messages_that_we_leave(
    end: str, tmp_path: Path, rocketmq_broker: OpenBroker
) -> None:
    root = tmp_path / "store"
    sent = [b"delayed %d" % number for number in range(12)]
    with NodeProcess(root) as node:
        with Producer(node.address) as producer:
            for body in sent:
                producer.send("Later", body, delay_level=2)
        leave(node, end)
    with rocketmq_broker(root) as broker:
        broker.wait_for(lambda: len(broker.bodies("Later")) >= len(sent), "all are delivered")
        broker.kill()
    with NodeProcess(root) as node, Producer(node.address) as producer:
        producer.send("Later", b"the last one")
        time.sleep(2)  # a second delivery would come at once
    lines = stored(root, "Later")
    assert bodies(lines) == Counter([*sent, b"the last one"])
    assert_not_early([line for line in lines if b"delayed" in bytes.fromhex(line["body_hex"])])


@ENDS
def test_we_deliver_the_delayed_messages_that_rocketmq_leaves(
    end: str, tmp_path: Path, rocketmq_broker: OpenBroker
) -> None:
    root = tmp_path / "store"
    with rocketmq_broker(root) as broker:
        for number in range(6):
            broker.ask("send", "Later", f"delayed {number}", "DELAY", "2")
        if end == "kill":
            broker.kill()
    with NodeProcess(root) as node:
        deadline = time.monotonic() + 30
        while len(stored(root, "Later")) < 6 and time.monotonic() < deadline:
            time.sleep(0.5)
        leave(node, end)
    with NodeProcess(root):
        time.sleep(2)
    lines = stored(root, "Later")
    assert bodies(lines) == Counter(b"delayed %d" % number for number in range(6))
    assert_not_early(lines)


INVISIBLE_S = 5
GROUP, SHARED = "sharers", "Shared"


def assert_given_out(found: Counter[bytes], sent: list[bytes], end: str) -> None:
    """All but the two acknowledged ones. After a kill the file of offsets is some seconds old: what was given out since then
    may come twice, and none is lost. A successor that is RocketMQ itself would do the same.
    """
    if end == "stop":
        assert found == Counter(sent[2:])
    else:
        assert set(sent[2:]) <= set(found) <= set(sent)


@ENDS
def test_rocketmq_revives_what_our_consumer_left(end: str, tmp_path: Path, rocketmq_broker: OpenBroker) -> None:
    root = tmp_path / "store"
    sent = [b"%d" % number for number in range(8)]
    with NodeProcess(root, "network.cluster_name=C", "network.broker_name=b0", "topics.default_queues=1") as node:
        with Producer(node.address) as producer:
            for body in sent:
                producer.send(SHARED, body)
        with ShareConsumer(SHARED, group=GROUP, node=node.address, invisible_s=INVISIBLE_S) as consumer:
            many = consumer.receive(6, 5)
            assert [one.body for one in many] == sent[:6]
            assert consumer.ack(many[:2]) == []
        popped = time.monotonic()
        leave(node, end)
    with rocketmq_broker(root) as broker:
        found: Counter[bytes] = Counter()
        while not set(sent[2:]) <= set(found) and time.monotonic() < popped + 60:
            for one in broker.ask("pop", GROUP, SHARED, 60_000, 32):
                body = bytes.fromhex(one["body_hex"])
                found[body] += 1
                if body in sent[2:6] and end == "stop":
                    assert time.monotonic() > popped + INVISIBLE_S - 1, "RocketMQ gives it out early"
                    assert one["reconsume_times"] == 1
        broker.kill()
    assert_given_out(found, sent, end)


@ENDS
def test_we_revive_what_rocketmqs_consumer_left(end: str, tmp_path: Path, rocketmq_broker: OpenBroker) -> None:
    root = tmp_path / "store"
    with rocketmq_broker(root, defaultTopicQueueNums=1) as broker:
        for number in range(8):
            broker.ask("send", SHARED, f"{number}")
        many = broker.ask("pop", GROUP, SHARED, INVISIBLE_S * 1000, 6)
        popped = time.time()
        assert len(many) == 6
        for one in many[:2]:
            place = (one["queue_id"], one["queue_offset"], one["properties"]["POP_CK"])
            assert broker.ask("ack", GROUP, SHARED, *place)
        if end == "kill":
            broker.kill()
    found: Counter[bytes] = Counter()
    with (
        NodeProcess(root, "network.cluster_name=C", "network.broker_name=b0") as node,
        ShareConsumer(SHARED, group=GROUP, node=node.address, invisible_s=60) as consumer,
    ):
        deadline = time.monotonic() + 60
        while not {b"%d" % number for number in range(2, 8)} <= set(found) and time.monotonic() < deadline:
            for message in consumer.receive(32, 1):
                found[message.body] += 1
                if message.body in [b"%d" % number for number in range(2, 6)] and end == "stop":
                    assert time.time() >= popped + INVISIBLE_S - 0.5
                    assert message.reconsume_times == 1
                message.ack()
        leave(node, end)
    assert_given_out(found, [b"%d" % number for number in range(8)], end)


IN_ORDER = "walkers"


@ENDS
def test_rocketmq_goes_on_with_a_queue_that_our_consumer_receives_in_order(
    end: str, tmp_path: Path, rocketmq_broker: OpenBroker
) -> None:
    root = tmp_path / "store"
    sent = [b"%d" % number for number in range(8)]
    with NodeProcess(root, "network.cluster_name=C", "network.broker_name=b0", "topics.default_queues=1") as node:
        with Producer(node.address) as producer:
            for body in sent:
                producer.send(SHARED, body)
        with ShareConsumer(
            SHARED, group=IN_ORDER, node=node.address, invisible_s=INVISIBLE_S, ordered=True
        ) as consumer:
            many = consumer.receive(6, 5)
            popped = time.monotonic()
            assert [one.body for one in many] == sent[:6]
            assert consumer.ack([many[0], many[2]]) == []
            assert consumer.nack(many[1], untried=True) == []  # (RocketMQ counts it all the same.)
        # The journal has it at once; RocketMQ's file follows each pop.persist_interval_ms.
        file = root / "config" / "consumerOrderInfo.json"
        eventually(lambda: file.exists() and '"cm":5' in file.read_text(), "RocketMQ's file has both acks")
        eventually(lambda: '"untried":' in file.read_text(), "and what came back untried")
        leave(node, end)
    with rocketmq_broker(root) as broker:
        found: list[dict[str, Any]] = []
        while not found and time.monotonic() < popped + 60:
            found = broker.ask("pop", IN_ORDER, SHARED, 60_000, 32, "ordered")
        assert time.monotonic() > popped + INVISIBLE_S - 1, "RocketMQ gives it out early"
        given = [bytes.fromhex(one["body_hex"]) for one in found]
        assert given == (sent[1:] if end == "stop" else sent[-len(given) :]), (
            "RocketMQ gives out what was acked behind a gap"
        )
        assert len(given) >= 7
        assert [one["reconsume_times"] for one in found][-7:] == [1] * 5 + [0] * 2
        for one in found:
            place = (one["queue_id"], one["queue_offset"], one["properties"]["POP_CK"])
            assert broker.ask("ack", IN_ORDER, SHARED, *place)
        assert broker.ask("pop", IN_ORDER, SHARED, 60_000, 32, "ordered") == []
        broker.kill()


@ENDS
def test_we_go_on_with_a_queue_that_rocketmqs_consumer_receives_in_order(
    end: str, tmp_path: Path, rocketmq_broker: OpenBroker
) -> None:
    root = tmp_path / "store"
    sent = [b"%d" % number for number in range(8)]
    with rocketmq_broker(root, defaultTopicQueueNums=1) as broker:
        for body in sent:
            broker.ask("send", SHARED, body.decode())
        many = broker.ask("pop", IN_ORDER, SHARED, INVISIBLE_S * 1000, 6, "ordered")
        popped = time.monotonic()
        assert [bytes.fromhex(one["body_hex"]) for one in many] == sent[:6]
        for one in (many[0], many[2]):
            place = (one["queue_id"], one["queue_offset"], one["properties"]["POP_CK"])
            assert broker.ask("ack", IN_ORDER, SHARED, *place)
        if end == "kill":
            broker.kill()
    with (
        NodeProcess(root, "network.cluster_name=C", "network.broker_name=b0") as node,
        ShareConsumer(SHARED, group=IN_ORDER, node=node.address, ordered=True) as consumer,
    ):
        found = consumer.receive(32, 30)
        if end == "stop":
            assert time.monotonic() > popped + INVISIBLE_S - 0.5
            assert [(one.body, one.reconsume_times) for one in found] == [
                (sent[number], int(number < 6)) for number in (1, 3, 4, 5, 6, 7)
            ]
        else:  # RocketMQ's files may be some seconds old
            assert [one.body for one in found if one.body != sent[2]][-6:] == [
                sent[number] for number in (1, 3, 4, 5, 6, 7)
            ]
        assert consumer.ack(found) == []
        assert consumer.receive(32, 1) == []
        leave(node, end)


SENDERS = "senders"
OPEN = [b"open %d" % number for number in range(4)]


def decide(state: TransactionState) -> Callable[[HalfMessage], TransactionState]:
    return lambda _message: state


@ENDS
def test_rocketmq_ends_the_transactions_that_we_leave(end: str, tmp_path: Path, rocketmq_broker: OpenBroker) -> None:
    root = tmp_path / "store"
    with NodeProcess(root, "transaction.timeout_ms=60000") as node:
        with Producer(node.address, group=SENDERS, transaction_listener=decide(TransactionState.UNKNOWN)) as producer:
            for body in OPEN:
                with producer.transaction("Booked", body) as transaction:
                    transaction.unknown()
            with producer.transaction("Booked", b"ended"):
                pass
        leave(node, end)
    with rocketmq_broker(root, transactionOpBatchInterval=50, transactionCheckInterval=3000) as broker:
        assert broker.bodies("Booked") == [b"ended"]
        broker.ask("decide", SENDERS, "commit")
        broker.wait_for(lambda: set(OPEN) <= set(broker.bodies("Booked")), "all are committed", 60)
        assert set(broker.ask("asked", SENDERS)) - {"ended"} == {body.decode() for body in OPEN}
        broker.kill()
    with (
        NodeProcess(root, "transaction.timeout_ms=500", "transaction.check_interval_ms=500") as node,
        Producer(node.address, group=SENDERS, transaction_listener=decide(TransactionState.COMMIT)),
    ):
        time.sleep(4)  # what was still open would be committed now
    found = bodies(stored(root, "Booked"))
    # A node that was killed may not have told in the op topic yet that a transaction has ended. Our node finds the message in
    # the log; RocketMQ asks again and stores it twice.
    again = found.pop(b"ended")
    assert again == 1 or (end == "kill" and again == 2)
    assert found == Counter(OPEN)


@ENDS
def test_we_end_the_transactions_that_rocketmq_leaves(end: str, tmp_path: Path, rocketmq_broker: OpenBroker) -> None:
    root = tmp_path / "store"
    with rocketmq_broker(root, transactionCheckInterval=600_000) as broker:
        for body in OPEN:
            broker.ask("half", SENDERS, "Booked", body.decode(), "unknown")
        if end == "kill":
            broker.kill()
    asked: Counter[bytes] = Counter()

    def check(message: HalfMessage) -> TransactionState:
        asked[message.body] += 1
        return TransactionState.ROLLBACK if message.body == OPEN[0] else TransactionState.COMMIT

    with NodeProcess(root, "transaction.timeout_ms=500", "transaction.check_interval_ms=500") as node:
        with Producer(node.address, group=SENDERS, transaction_listener=check):
            deadline = time.monotonic() + 40
            while len(stored(root, "Booked")) < 3 and time.monotonic() < deadline:
                time.sleep(0.5)
            time.sleep(2)
        leave(node, end)
    assert set(asked) == set(OPEN)
    assert bodies(stored(root, "Booked")) == Counter(OPEN[1:])
