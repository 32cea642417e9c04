"""Goal: a message with a time of its own comes once, at that time and not before it; a cancelled one never comes.

Method: real nodes. Times around the ends of seconds, which are the slots of the wheel; runs with a time per message; messages
that roll; restarts with messages that wait and that became due meanwhile; refusals; RocketMQ's own store with all kinds of
timers, left by a stop and by a kill.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from commitmq import Admin, AsyncProducer, InvalidMessageError, Producer, SendError
from commitmq.format.constants import Host
from commitmq.format.timer import WHEEL_BYTES
from commitmq.semantics.timer import RecallHandle
from delays import Peer, everything
from golden_stores import unpack
from nodes import Node, eventually, start_node, started
from pending_store import read_pending_store
from timer_model import delivered

pytestmark = pytest.mark.timeout(120)
TOPIC, QUEUES, TIMER = "parcels", 3, "rmq_sys_wheel_timer"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("times"), "timer.roll_window_s=2", "timer.max_delay_ms=60000") as made:
        with Admin(made.address) as admin:
            admin.topic_create(TOPIC, QUEUES)
            admin.topic_create("other", 1)
        yield made


def found(node: Node, start: bytes, topic: str = TOPIC) -> dict[bytes, list[int]]:
    """The times at which each message whose body begins so was delivered."""
    times: dict[bytes, list[int]] = {}
    for one in everything(node, topic):
        if one.body.startswith(start):
            times.setdefault(one.body, []).append(one.store_timestamp)
    return times


def check_times(node: Node, due: dict[bytes, int], start: bytes, late_ms: int = 1_000) -> None:
    eventually(lambda: len(found(node, start)) >= len(due), "all are delivered", timeout_s=30)
    times = found(node, start)
    assert times.keys() == due.keys()
    assert all(len(one) == 1 for one in times.values()), "each once"
    lateness = sorted(times[body][0] - at for body, at in due.items())
    assert lateness[0] >= 0, "none early"
    assert lateness[len(lateness) // 2] < late_ms / 4, lateness
    assert lateness[-1] < late_ms, lateness


def test_messages_come_at_their_times(node: Node) -> None:
    """Times of all kinds of fractions of a second, the ends of seconds and one ms beside them among them."""
    start = now_ms()
    whole = (start // 1000 + 2) * 1000
    times = [start + 150 + 41 * number for number in range(40)] + [whole - 1, whole, whole + 1]
    due = {b"at-%d-%d" % (number, at): at for number, at in enumerate(times)}
    with Producer(node.address) as producer:
        futures = [producer.send_async(TOPIC, body, deliver_at=at) for body, at in due.items()]
        results = [future.result(10) for future in futures]
    assert {one.stored_topic for one in results} == {TIMER}
    check_times(node, due, b"at-")


def test_a_run_has_a_time_per_message_and_messages_roll(node: Node) -> None:
    """With a window of two seconds what is due later than that is stored again, and still comes once."""
    start = now_ms()
    bodies = [b"run-%d" % number for number in range(60)]
    delays = [200 + 83 * number for number in range(60)]
    kinds = (b"TIMER_DELAY_MS\x01%d\x02", b"TIMER_DELIVER_MS\x01%d\x02")
    properties = [kinds[number % 2] % (one + start * (number % 2)) for number, one in enumerate(delays)]
    with Peer(node) as peer:
        answer = peer.append_with(TOPIC, bodies, properties, queue=1)
        assert answer["ok"], answer
    check_times(node, dict(zip(bodies, [start + one for one in delays], strict=True)), b"run-", late_ms=2_500)
    assert all(one.queue == 1 for one in everything(node, TOPIC) if one.body.startswith(b"run-"))
    with Admin(node.address) as admin:
        assert "set_aside" not in {row["role"]: row for row in admin.status()["processes"]}["timer"]["info"]


def test_the_first_of_several_requests_counts(node: Node) -> None:
    """Spec 12.2: TIMER_DELAY_SEC, then TIMER_DELAY_MS, then TIMER_DELIVER_MS; DELAY above 0 wins over all of them."""
    both = {"TIMER_DELIVER_MS": "1", "TIMER_DELAY_MS": "40000", "TIMER_DELAY_SEC": "30"}
    with Peer(node) as peer:
        answer = peer.ask(b"x", op="send", topic="other", queue=0, properties=both)
        assert answer["stored_topic"] == TIMER
        level = peer.ask(b"by level", op="send", topic="other", queue=0, properties={**both, "DELAY": "1"})
        assert level["stored_topic"] == "SCHEDULE_TOPIC_XXXX"
        none = peer.ask(b"x", op="send", topic="other", queue=0, properties={**both, "DELAY": "0"})
        assert none["stored_topic"] == TIMER
    with Admin(node.address) as admin:
        stored = admin.message(answer["msg_id"])
        assert stored.properties["REAL_TOPIC"] == "other"
        assert 29_000 <= int(stored.properties["TIMER_OUT_MS"]) - stored.store_timestamp <= 30_000
        kept = admin.message(level["msg_id"]).properties
        assert not {name for name in kept if name.startswith("TIMER")}, "a delay level's message keeps no request"


REFUSED: list[tuple[dict[str, str], str, str]] = [
    ({"TIMER_DELAY_SEC": "soon"}, "WHEEL_TIMER_MSG_ILLEGAL", "is no number"),
    ({"TIMER_DELAY_MS": "1.5"}, "WHEEL_TIMER_MSG_ILLEGAL", "is no number"),
    ({"TIMER_DELIVER_MS": "9" * 30}, "WHEEL_TIMER_MSG_ILLEGAL", "is no number"),
    ({"TIMER_DELAY_SEC": "61"}, "WHEEL_TIMER_MSG_ILLEGAL", "timer.max_delay_ms"),
    ({"TIMER_DELAY_SEC": str((1 << 63) - 1)}, "WHEEL_TIMER_MSG_ILLEGAL", "timer.max_delay_ms"),
    ({"TIMER_DELIVER_MS": "1", "TIMER_DEL_UNIQKEY": "x"}, "WHEEL_TIMER_MSG_ILLEGAL", "before the time"),
    ({"TIMER_DEL_UNIQKEY": "x"}, "MESSAGE_ILLEGAL", "a time of delivery"),
    ({"TIMER_OUT_MS": "1"}, "MESSAGE_ILLEGAL", "only the node"),
]


@pytest.mark.parametrize(("properties", "code", "words"), REFUSED)
def test_refusals(node: Node, properties: dict[str, str], code: str, words: str) -> None:
    with Peer(node) as peer:
        answer = peer.ask(b"x", op="send", topic=TOPIC, queue=0, properties=properties)
    assert (answer["ok"], answer.get("code"), answer.get("outcome")) == (False, code, "not_stored")
    assert words in answer["error"]


def test_properties_that_leave_no_room_take_no_other_message_along(node: Node) -> None:
    """A message gets properties when it is delivered. One that is accepted must have room for them."""
    at = now_ms() + 2_000
    with Peer(node) as peer:
        for size in range(32_700, 32_000, -20):
            properties = {"TIMER_DELIVER_MS": str(at), "filler": "x" * size}
            answer = peer.ask(b"room-large", op="send", topic=TOPIC, queue=0, properties=properties)
            if answer["ok"]:
                break
            assert answer["code"] == "PROPERTIES_SIZE_EXCEEDED", answer
        small = {"TIMER_DELIVER_MS": str(at)}
        assert peer.ask(b"room-small", op="send", topic=TOPIC, queue=0, properties=small)["ok"]
    check_times(node, {b"room-large": at, b"room-small": at}, b"room-")


def test_a_run_is_timed_or_not(node: Node) -> None:
    with Peer(node) as peer:
        mixed = peer.append_with(TOPIC, [b"a", b"b"], [b"TIMER_DELAY_MS\x01500\x02", b""])
        assert (mixed["code"], mixed["outcome"]) == ("MESSAGE_ILLEGAL", "not_stored")
        passed = peer.append_with("other", [b"now-1", b"now-2"], [b"TIMER_DELIVER_MS\x011\x02"] * 2)
        assert "stored_topic" not in passed, "a time that has passed is none"
        some = peer.append_with(
            "other", [b"now-3", b"now-4"], [b"TIMER_DELIVER_MS\x011\x02", b"TIMER_DELAY_MS\x01300\x02"]
        )
        assert some["stored_topic"] == TIMER, "one of them waits, so they go together"
        plain = peer.ask(b"x", op="send", topic=TIMER, queue=0, properties={})
        assert plain["code"] == "NO_PERMISSION"
    eventually(lambda: len(found(node, b"now-", "other")) == 4, "all are there")


def test_a_second_that_is_full_takes_no_more(tmp_path: Path) -> None:
    """Also in the next life of the writer, which finds in the wheel what its slots have."""
    node = Node(tmp_path / "store", "timer.slot_messages=3")
    with started(node):
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, 1)
        due = now_ms() // 1000 * 1000 + 45_500
        refused: list[SendError] = []
        for _ in range(2):
            with Producer(node.address) as producer:
                for number in range(40):
                    try:
                        sent = producer.send(TOPIC, b"%d" % number, deliver_at=due)
                    except SendError as error:
                        refused.append(error)
                producer.send(TOPIC, b"a second later", deliver_at=due + 1_000)
                producer.cancel(sent)
            with Admin(node.address) as admin:
                assert [one.due for one in admin.delayed(TOPIC).messages].count(due) <= 6
            if len(refused) < 40:
                eventually(lambda: node.row("timer")["info"].get("waiting", 0) > 5, "the wheel is written")
                assert node.stop().returncode == 0
                assert node.start().returncode == 0
        assert len(refused) >= 2 * 40 - 7, "the cancelled one made room for another"
        assert {(one.code, one.outcome) for one in refused} == {("WHEEL_TIMER_FLOW_CONTROL", "not_stored")}
        assert all(one.retryable and one.retry_after_ms == 1_000 for one in refused)


# ---------------------------------------------------------------- cancelling


def test_a_cancelled_message_never_comes(node: Node) -> None:
    with Producer(node.address) as producer:
        results = [producer.send(TOPIC, b"kept-%d" % number, delay=1.9) for number in range(3)]
        alone = producer.send(TOPIC, b"gone-1", delay=1.9)
        many = producer.send_batch(TOPIC, [b"gone-2", b"kept-3"], delay=1.9)
        rolls = producer.send(TOPIC, b"gone-3", delay=5)
        for one in (alone, alone, many[0], rolls):
            producer.cancel(one)
        producer.cancel(
            RecallHandle(TOPIC, "any", due_second(node, results[0].msg_id) + 1, results[0].unique_id).encode()
        )

    async def main() -> None:
        async with AsyncProducer(node.address) as sender:
            await sender.cancel(await sender.send(TOPIC, b"gone-4", delay=1.9))

    asyncio.run(main())
    eventually(lambda: len(found(node, b"kept-")) == 3, "the others come")
    time.sleep(4)
    assert sorted(found(node, b"kept-")) == [b"kept-1", b"kept-2", b"kept-3"]
    assert found(node, b"gone-") == {}


def due_second(node: Node, msg_id: str) -> int:
    with Admin(node.address) as admin:
        return int(admin.message(msg_id).properties["TIMER_OUT_MS"])


def test_what_cannot_be_cancelled(node: Node) -> None:
    with Producer(node.address) as producer:
        plain = producer.send(TOPIC, b"plain")
        level = producer.send(TOPIC, b"level", delay_level=1)
        soon = producer.send(TOPIC, b"soon", delay=0.3)
        later = producer.send(TOPIC, b"later", delay=5)
        for one in (plain, level):
            with pytest.raises(InvalidMessageError, match="can be cancelled"):
                producer.cancel(one)
        with pytest.raises(InvalidMessageError):
            producer.cancel("no handle")
        with pytest.raises(InvalidMessageError, match="SendResult or a recall handle"):
            producer.cancel(b"x")  # type: ignore[arg-type]
        with pytest.raises(SendError) as caught:
            producer.cancel(soon)
        assert (caught.value.code, caught.value.outcome) == ("ILLEGAL_OPERATION", "not_stored")
        for wrong in ({"physical_offset": 1}, {"unique_id": "0" * 32}, {"physical_offset": 1 << 40}):
            with pytest.raises(SendError) as caught:
                producer.cancel(later._replace(**wrong))
            assert (caught.value.code, caught.value.outcome) == ("MESSAGE_ILLEGAL", "not_stored")
        producer.cancel(later)


# ---------------------------------------------------------------- restarts and files


def test_messages_wait_while_the_node_is_down(tmp_path: Path) -> None:
    node = Node(tmp_path / "store", "timer.log_file_bytes=1040")
    with started(node):
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, QUEUES)
        start = now_ms()
        due = {b"down-%d" % number: start + 400 + 90 * number for number in range(60)}
        with Producer(node.address) as producer:
            for body, at in due.items():
                producer.send(TOPIC, body, deliver_at=at)
            gone = producer.send(TOPIC, b"gone", delay=3)
            producer.cancel(gone)
        eventually(lambda: node.row("timer")["state"] == "ready", "the timer runs")
        assert node.stop().returncode == 0
        time.sleep(1)
        assert (node.store / "timerwheel").stat().st_size == WHEEL_BYTES
        assert {path.stat().st_size for path in (node.store / "timerlog").iterdir()} == {1_040}
        counts = orjson.loads((node.store / "config" / "timermetrics").read_bytes())["timingCount"]
        assert counts.keys() == {TOPIC}
        assert 0 < counts[TOPIC]["count"] <= len(due), "the cancelled one is not counted"
        assert node.start().returncode == 0
        eventually(lambda: len(found(node, b"")) == len(due), "all are delivered", timeout_s=30)
        times = found(node, b"")
        assert times.keys() == due.keys()
        assert all(len(one) == 1 and one[0] >= due[body] for body, one in times.items())
        assert "makes wheel and timer log from the queue" not in node.log().rpartition("epoch=2")[2]


def test_a_node_without_the_process_refuses(tmp_path: Path) -> None:
    with start_node(tmp_path, "timer.enable=false") as node, Producer(node.address) as producer:
        with pytest.raises(SendError) as caught:
            producer.send(TOPIC, b"x", delay=1.5)
        assert (caught.value.code, caught.value.outcome) == ("WHEEL_TIMER_NOT_ENABLE", "not_stored")


@pytest.mark.parametrize("stopped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["stopped", "killed"])
def test_what_rocketmq_left_waiting_is_delivered_once(tmp_path: Path, stopped: bool) -> None:
    golden = unpack("semantics", tmp_path)
    expected = orjson.loads((tmp_path / "expected.json").read_bytes())
    if not stopped:
        # A killed RocketMQ leaves ``abort``, and its positions are some seconds behind (spec 18, 5).
        (golden.root / "abort").write_text("1")
        check = bytearray((golden.root / "config" / "timercheck").read_bytes())
        read_ms = int.from_bytes(check[:8], "big")
        check[:32] = b"".join(one.to_bytes(8, "big") for one in (read_ms - 60_000, 0, 60, 60))
        (golden.root / "config" / "timercheck").write_bytes(check)
    wanted: dict[str, list[dict[str, Any]]] = {}
    for one in expected["messages"]:
        if one["kind"].startswith("timer"):
            wanted.setdefault(one["topic"], []).append(one)
    with started(Node.bare(golden.root, "network.port=0")) as node:
        for topic, messages in wanted.items():
            due: list[str] = [
                one["body_hex"]
                for one in messages
                if one["must"] == "in-topic" or (one["must"] == "deliver-at" and one["due_ms"] < now_ms() - 3_000)
            ]

            def bodies(topic: str = topic) -> Counter[str]:
                return Counter(one.body.hex() for one in everything(node, topic))

            eventually(partial(comes_to, bodies, len(due)), f"all of {topic}")
            time.sleep(1)
            assert bodies() == Counter(due)
        shutil.copytree(node.store / "commitlog", tmp_path / "copy" / "commitlog")
    check_bytes(read_pending_store(tmp_path / "copy"))


def comes_to(bodies: Callable[[], Counter[str]], count: int) -> bool:
    return bodies().total() >= count


def check_bytes(store: Any) -> None:
    """What this node delivered has the bytes that RocketMQ's rule gives, but for the clocks that it names."""
    waiting = {one.properties.get("UNIQ_KEY"): one for one in store.of(TIMER)}
    made = 0
    for record in store.of("PendingTimer", "PendingTimerTwo"):
        source = waiting.get(record.properties.get("UNIQ_KEY"))
        if source is None or "TIMER_DEQUEUE_MS" not in record.properties or record.physical_offset < 186_752:
            continue
        times = (int(record.properties[name]) for name in ("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS"))
        copy = delivered(source, *times)
        assert list(copy.properties.items()) == [
            (name, value) for name, value in record.properties.items() if name != "__CRC32#"
        ]
        assert (copy.born_host, copy.born_timestamp, copy.body) == (
            record.born_host, record.born_timestamp, record.body,
        )  # fmt: skip
        assert isinstance(record.born_host, Host)
        made += 1
    assert made > 10
