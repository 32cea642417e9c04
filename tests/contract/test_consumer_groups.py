"""Goal: what a group has committed is a place that its program reached, in the topic as it is, and stays what it was set to.

Method: a real node with two readers, whose topics are made anew, grown and shrunk and whose processes are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commitmq import (
    Admin,
    AsyncConsumer,
    CommitMQError,
    Consumer,
    FencedError,
    Message,
    MessageSelector,
    Producer,
    ProtocolError,
    Reader,
)
from commitmq.client.receiving import membership
from commitmq.client.receiving.assignment import start_offsets
from commitmq.protocol.directory import Directory
from nodes import Node, commitmq, eventually, free_ports, start_node

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(
        tmp_path_factory.mktemp("groups"),
        "reader.count=2",
        "groups.heartbeat_interval_ms=200",
        "groups.session_timeout_ms=1500",
        "topics.default_queues=1",
    ) as made:
        yield made


@pytest.fixture
def admin(node: Node) -> Iterator[Admin]:
    with Admin(node.address) as made:
        yield made


def send(node: Node, topic: str, count: int, queue: int = 0, body: bytes = b"%d") -> list[bytes]:
    bodies = [body % number for number in range(count)]
    with Producer(node.address) as producer, Admin(node.address) as admin:
        first = producer.send(topic, bodies[0], queue=queue)
        if count > 1:
            producer.send_batch(topic, bodies[1:], queue=queue)
        end = first.queue_offset + count
        eventually(
            lambda: any(row[0] == queue and row[2] >= end for row in admin.offsets(topic)), "all of it can be read"
        )
    return bodies


def drain(consumer: Consumer | Reader, count: int, seconds: float = 30) -> list[Message]:
    messages: list[Message] = []
    deadline = time.monotonic() + seconds
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count} came"
        messages += consumer.poll(0.2)
    return messages


def coordinator(node: Node, op: str, **fields: Any) -> dict[str, Any]:
    directory = Directory(node.address)
    channel, _ = directory.connect("coordinator", time.monotonic() + 30)
    try:
        return channel.request(op, fields, timeout_s=30)[0]
    finally:
        channel.close()
        directory.close()


def rows(admin: Admin, group: str) -> dict[int, Any]:
    return {row.queue: row.committed for row in admin.group_lag(group)}


# ---------------------------------------------------------------- offsets behind the end


@pytest.mark.parametrize("way", ["start", "seek", "commit"])
def test_nothing_behind_a_queues_end_is_committed(node: Node, admin: Admin, way: str) -> None:
    topic = group = f"beyond-{way}"
    send(node, topic, 10)
    with Consumer(
        topic, group=group, node=node.address, start=1000 if way == "start" else "earliest", auto_commit_interval_s=0
    ) as consumer:
        if way != "start":
            drain(consumer, 10)
        if way == "seek":
            consumer.seek(topic, 0, 10**9)
        if way == "commit":
            assert consumer.commit({(topic, 0): 10**15}) == {(topic, 0): 10}
        for _ in range(3):
            consumer.poll(0.05)
            assert (rows(admin, group)[0] or 0) <= 10
        eventually(lambda: not consumer.poll(0.1) and consumer.positions[topic, 0] == 10, "it goes on at the end")
    assert rows(admin, group)[0] <= 10
    send(node, topic, 5)
    with Consumer(topic, group=group, node=node.address) as consumer:
        assert len(drain(consumer, 5)) == 5


@pytest.mark.slow
def test_a_commit_that_is_ahead_of_the_queue_is_told_and_can_be_lowered(tmp_path: Path) -> None:
    """As a version before this one, or RocketMQ, may have left it in the file."""
    with start_node(tmp_path, "groups.heartbeat_interval_ms=200", "topics.default_queues=1") as node:
        send(node, "ahead", 10)
        with Consumer("ahead", group="ahead", node=node.address) as consumer:
            drain(consumer, 10)
        assert node.stop().returncode == 0
        path = node.store / "config" / "consumerOffset.json"
        path.write_text(path.read_text().replace("0:10", "0:500"))
        assert node.start().returncode == 0
        with Admin(node.address) as admin:
            (row,) = admin.group_lag("ahead")
            assert (row.committed, row.end) == (500, 10)
            assert "500" in str(row.problem)
            shown = commitmq("group", "lag", "ahead", "--node", node.address).stdout
            assert "ahead queue 0: offset 500 is committed, and the queue ends at 10: reset the group's offset" in shown
            with Consumer("ahead", group="ahead", node=node.address, auto_commit_interval_s=0) as consumer:
                eventually(lambda: not consumer.poll(0.1) and consumer.positions["ahead", 0] == 10, "it goes back")
                eventually(lambda: not consumer.poll(0.1) and rows(admin, "ahead")[0] == 10, "the owner lowers it")
            send(node, "ahead", 3)
            with Consumer("ahead", group="ahead", node=node.address) as consumer:
                assert len(drain(consumer, 3)) == 3
            assert admin.group_lag("ahead")[0].problem is None


# ---------------------------------------------------------------- another store under the same address


@pytest.mark.slow
def test_messages_are_never_read_from_another_stores_files(tmp_path: Path) -> None:
    """Two stores with the same log but for the bodies: place, size and CRC of every record pass in both."""
    settings = (f"network.port={free_ports()}", "topics.default_queues=1")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, body in ((first, b"a%05d"), (second, b"b%05d")):
        folder.mkdir()
        with start_node(folder, *settings) as node:
            node_address = node.address
            send(node, "same", 500, body=body)
    with start_node(first, *settings) as node:
        consumer = Reader("same", node=node_address, queues=[("same", 0)])
        assert {one.body[:1] for one in drain(consumer, 500)} == {b"a"}
        assert len(consumer._puller._readers.segments) == 1
        mapped = next(iter(consumer._puller._readers.segments.values()))
    with start_node(second, *settings), consumer:
        seen: list[bytes] = []
        deadline = time.monotonic() + 40
        while len(seen) < 500 and time.monotonic() < deadline:
            seen += [one.body for one in consumer.poll(0.3)]
        assert {one[:1] for one in seen} == {b"b"}
        assert mapped not in consumer._puller._readers.segments.values()


# ---------------------------------------------------------------- waits, resets, sessions


def test_a_reset_is_not_undone_by_a_member_that_was_away(node: Node, admin: Admin) -> None:
    """A member sleeps for longer than its session, as in a suspended machine; meanwhile its group is set back."""
    send(node, "asleep", 300)
    with Consumer("asleep", group="asleep", node=node.address, auto_commit_interval_s=0) as consumer:
        drain(consumer, 200)
        consumer.commit()
        member = consumer._member
        assert member is not None
        with contextlib.ExitStack() as asleep:
            turn = member._turn
            member._turn = lambda: 0.1  # type: ignore[method-assign]
            asleep.callback(setattr, member, "_turn", turn)
            eventually(lambda: not admin.group("asleep")["members"], "the session ends")
            admin.reset_offsets("asleep", "asleep", 50)
        messages = drain(consumer, 250)
        assert {one.queue_offset for one in messages} >= set(range(50, 200))
    assert rows(admin, "asleep")[0] == 300


def test_a_commit_never_goes_over_a_reset(node: Node, admin: Admin) -> None:
    """The coordinator's side of it: what a member knew to be committed is no more."""
    send(node, "known", 100)
    fields = {"group": "known", "offsets": [["known", 0, 60]]}
    coordinator(node, "offset.commit", **fields)
    admin.reset_offsets("known", "known", 10)
    with pytest.raises(FencedError, match="reset from 60 to 10"):
        coordinator(node, "offset.commit", group="known", offsets=[["known", 0, 70]], known=[60])
    assert coordinator(node, "offset.commit", group="known", offsets=[["known", 0, 70]], known=[10])["stored"] == [
        ["known", 0, 70]
    ]


@pytest.mark.slow
def test_resets_wait_for_members_of_before_the_coordinators_death(tmp_path: Path) -> None:
    with start_node(
        tmp_path, "groups.heartbeat_interval_ms=400", "groups.session_timeout_ms=4000", "topics.default_queues=1"
    ) as node:
        send(node, "awaited", 50)
        with (
            Consumer("awaited", group="awaited", node=node.address, auto_commit_interval_s=0) as consumer,
            Admin(node.address) as admin,
        ):
            drain(consumer, 50)
            consumer.commit()
            stop = threading.Event()
            accepted: list[Any] = []

            def reset() -> None:
                while not stop.is_set():
                    with contextlib.suppress(ProtocolError):
                        accepted.append(admin.reset_offsets("awaited", "awaited", "earliest"))

            thread = threading.Thread(target=reset)
            thread.start()
            pid = node.pids()["coordinator"]
            os.kill(pid, signal.SIGKILL)
            eventually(partial(node.healed, "coordinator", pid), "the coordinator is back")
            for _ in range(15):
                consumer.poll(0.1)
            stop.set()
            thread.join(30)
            assert not accepted


def test_a_commit_of_before_a_gift_is_fenced(node: Node) -> None:
    send(node, "gifts", 20)

    def ask(op: str, member: str, **fields: Any) -> dict[str, Any]:
        return coordinator(node, op, group="gifts", member=member, **fields)

    first = ask("group.join", "a", topics=["gifts"])
    ask("group.leave", "a")
    ask("group.join", "b", topics=["gifts"])
    ask("offset.commit", "b", offsets=[["gifts", 0, 3]])
    ask("group.leave", "b")
    again = ask("group.join", "a", topics=["gifts"])
    with pytest.raises(FencedError, match="was given it again"):
        ask("offset.commit", "a", offsets=[["gifts", 0, 15]], generation=first["generation"])
    ask("offset.commit", "a", offsets=[["gifts", 0, 4]], generation=again["generation"])
    ask("group.leave", "a")


def test_a_member_whose_program_does_not_poll_leaves_until_it_does(node: Node, admin: Admin) -> None:
    send(node, "dead-thread", 40)
    with Consumer(
        "dead-thread", group="dead", node=node.address, max_poll_interval_s=1.0, auto_commit=False
    ) as consumer:
        drain(consumer, 40)
        eventually(lambda: not admin.group("dead")["members"], "it leaves")
        with Consumer("dead-thread", group="dead", node=node.address) as other:
            assert len(drain(other, 40)) == 40
        assert len(drain(consumer, 0)) == 0
        eventually(lambda: not consumer.poll(0.1) and consumer.assignment == [("dead-thread", 0)], "it is back")
    with pytest.raises(ValueError, match="max_poll_interval_s"):
        Consumer("dead-thread", group="dead", node=node.address, max_poll_interval_s=0)


# ---------------------------------------------------------------- topics that change


def test_latest_loses_nothing_of_what_comes_later(node: Node, admin: Admin) -> None:
    """Queues that a topic gets, and topics that are made, after the consumer was: all of them is new."""
    admin.topic_create("grows", 1)
    send(node, "grows", 5, body=b"old%d")
    with (
        Consumer(["grows", "comes"], group="grows", node=node.address, start="latest", auto_commit=False) as member,
        Reader(["grows", "comes"], node=node.address, start="latest") as alone,
    ):
        eventually(lambda: member.assignment == [("grows", 0)], "it has joined")
        assert not member.poll(0.2)
        assert rows(admin, "grows")[0] == 5, "where it begins is committed, though nothing else is"
        coordinator(node, "topic.create", topic="grows", queues=2, update=True)
        send(node, "grows", 20, queue=1, body=b"new%d")
        send(node, "comes", 20, body=b"new%d")
        assert len(drain(member, 40)) == 40
        assert len(drain(alone, 40)) == 40
    # A member that comes when the queue is there, but the group has never read it.
    coordinator(node, "topic.create", topic="grows", queues=3, update=True)
    send(node, "grows", 7, queue=2, body=b"last%d")
    with Consumer("grows", group="grows", node=node.address, start="latest") as member:
        assert len({one.body for one in drain(member, 27) if one.body.startswith(b"last")}) == 7


def test_a_topic_that_loses_queues_is_no_error(node: Node, admin: Admin) -> None:
    admin.topic_create("shrinks", 3)
    for queue in range(3):
        send(node, "shrinks", 10, queue=queue)
    with (
        Consumer("shrinks", group="shrinks", node=node.address, auto_commit_interval_s=0) as member,
        Reader("shrinks", node=node.address) as alone,
    ):
        drain(member, 30)
        drain(alone, 30)
        # What the last poll brought is confirmed by the next one only, and a queue that has gone takes no commit.
        member.commit()
        coordinator(node, "topic.create", topic="shrinks", queues=1, update=True)
        for consumer in (member, alone):
            eventually(lambda: not consumer.poll(0.1) and consumer.assignment == [("shrinks", 0)], "it is known")  # noqa: B023
        send(node, "shrinks", 5)
        assert len(drain(member, 5)) == len(drain(alone, 5)) == 5
        coordinator(node, "topic.create", topic="shrinks", queues=3, update=True)
        send(node, "shrinks", 4, queue=2)
        for consumer in (member, alone):
            assert {one.queue_offset for one in drain(consumer, 4)} == {10, 11, 12, 13}, (
                "the queue goes on where it was"
            )
    assert rows(admin, "shrinks")[2] == 14


def test_a_topic_that_loses_queues_while_one_begins_with_them_is_no_error(
    node: Node, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.topic_create("shrinks-now", 4)
    bodies = send(node, "shrinks-now", 10)
    looked_up = start_offsets

    def shrink(*words: Any, **names: Any) -> Any:
        found = looked_up(*words, **names)
        admin.topic_update("shrinks-now", 1)
        return found

    monkeypatch.setattr(membership, "start_offsets", shrink)
    with Consumer(["shrinks-now"], group="shrinker-now", node=node.address) as consumer:
        assert [one.body for one in drain(consumer, 10)] == bodies
        eventually(lambda: consumer.assignment == [("shrinks-now", 0)], "it has what the topic still has")


@pytest.mark.parametrize("when", ["before", "behind"])
def test_who_is_interrupted_while_it_joins_leaves_nothing_behind(
    node: Node, admin: Admin, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    topic, group = f"ghostly-{when}", f"ghosts-{when}"
    bodies = send(node, topic, 10)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == f"commitmq-member-{group}":
            if when == "behind":
                start(thread)
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Consumer([topic], group=group, node=node.address)
    monkeypatch.undo()
    assert not [one for one in threading.enumerate() if one.name == f"commitmq-member-{group}"]
    with Consumer([topic], group=group, node=node.address) as consumer:
        assert [one.body for one in drain(consumer, 10, 10)] == bodies


def test_a_deleted_topic_does_not_hold_up_the_others(node: Node, admin: Admin) -> None:
    send(node, "stays", 10)
    send(node, "goes", 10)
    with Consumer(["stays", "goes"], group="both", node=node.address, auto_commit_interval_s=60) as consumer:
        drain(consumer, 20)
        admin.topic_delete("goes")
    assert rows(admin, "both") == {0: 10}


def test_a_topic_that_does_not_exist_is_told(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    for kind in (partial(Reader, "never-made"), partial(Consumer, "never-made", group="told")):
        caplog.clear()
        with caplog.at_level(logging.WARNING), kind(node=node.address) as consumer:
            consumer.poll(0.1)
        assert [one for one in caplog.records if "does not exist" in one.getMessage()], kind


@pytest.mark.slow
def test_the_queues_of_a_dead_reader_go_on_beside_one_with_traffic(tmp_path: Path) -> None:
    with start_node(tmp_path, "reader.count=2", "topics.default_queues=8") as node, Producer(node.address) as producer:
        for queue in range(8):
            send(node, "readers", 5, queue=queue)
        with Reader("readers", node=node.address) as consumer:
            drain(consumer, 40)
            links = {state.channel for state in consumer._assignment.owned.values()}
            assert links == {0, 1}
            busy = [key[1] for key, state in consumer._assignment.owned.items() if state.channel == 0]
            quiet = [key[1] for key, state in consumer._assignment.owned.items() if state.channel == 1]
            pid = node.pids()["reader-1"]
            os.kill(pid, signal.SIGKILL)
            producer.send("readers", b"wanted", queue=quiet[0])
            deadline = time.monotonic() + 30
            bodies: list[bytes] = []
            while b"wanted" not in bodies and time.monotonic() < deadline:
                producer.send("readers", b"traffic", queue=busy[0])
                bodies += [one.body for one in consumer.poll(0.5)]
            assert b"wanted" in bodies


# ---------------------------------------------------------------- what a program is told, and what it says


def test_the_program_is_told_of_its_queues(node: Node, admin: Admin) -> None:
    admin.topic_create("told", 4)
    for queue in range(4):
        send(node, "told", 10, queue=queue)
    told: list[tuple[str, list[int]]] = []

    def note(what: str, queues: list[tuple[str, int]]) -> None:
        told.append((what, [queue for _, queue in queues]))

    def revoked(queues: list[tuple[str, int]]) -> None:
        note("-", queues)
        first.commit()

    with Consumer(
        "told", group="telling", node=node.address, auto_commit=False, member="a",
        on_assign=partial(note, "+"), on_revoke=revoked,
    ) as first:  # fmt: skip
        drain(first, 40)
        assert told == [("+", [0, 1, 2, 3])]
        with Consumer("told", group="telling", node=node.address, member="b") as second:
            eventually(
                lambda: not first.poll(0.1) and len(first.assignment) == 2 and len(second.assignment) == 2, "shared"
            )
            assert told[1:] == [("-", [2, 3])]
            assert not second.poll(0.5), "it was committed by then"
        eventually(lambda: not first.poll(0.1) and len(first.assignment) == 4, "all again")
        assert told[2:] == [("+", [2, 3])]
    assert told[3:] == [("-", [0, 1, 2, 3])]


def test_what_a_callback_raises_is_raised_and_it_is_called_again(node: Node) -> None:
    send(node, "callbacks", 5)
    calls = 0

    def fail(_queues: object) -> None:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise ZeroDivisionError

    with Consumer("callbacks", group="callbacks", node=node.address, on_assign=fail) as consumer:
        eventually(lambda: consumer.assignment == [("callbacks", 0)], "it has joined")
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                consumer.poll(5)
        assert len(drain(consumer, 5)) == 5
        assert calls == 3


def test_a_callback_that_raises_in_close_keeps_nothing_from_being_committed(node: Node, admin: Admin) -> None:
    bodies = send(node, "raises-last", 20)

    def revoked(_: object) -> None:
        raise KeyError("mine")

    consumer = Consumer(
        "raises-last", group="raises-last", node=node.address, on_revoke=revoked, auto_commit_interval_s=60
    )
    seen = [one.body for one in consumer.poll(10, 5)]
    assert seen == bodies[:5]
    assert len(consumer.poll(10, 5)) == 5  # so the first five are done
    with pytest.raises(KeyError, match="mine"):
        consumer.close()
    assert consumer.is_closed
    assert rows(admin, "raises-last") == {0: 5}, "what the callback had no chance to finish is not"


def test_a_callback_must_not_poll(node: Node) -> None:
    send(node, "polls-within", 1)

    def assigned(_: object) -> None:
        consumer.poll(0)

    with Consumer("polls-within", group="polls-within", node=node.address, on_assign=assigned) as consumer:
        with pytest.raises(CommitMQError, match="a poll is under way"):
            consumer.poll(5)
            consumer.poll(5)
        consumer._callbacks.on_assign = None


def test_endless_times_are_long_ones(node: Node) -> None:
    send(node, "endless", 3)
    with (
        Producer(node.address, timeout_s=math.inf, max_pending=2) as producer,
        Consumer("endless", group="endless", node=node.address, timeout_s=math.inf) as consumer,
        Admin(node.address, timeout_s=math.inf) as admin,
    ):
        for _ in range(10):
            producer.send_async("endless", b"x")
        producer.send("endless-other", b"x", key="k", timeout_s=math.inf)
        producer.send_batch("endless", [b"x", b"y"], timeout_s=math.inf)
        producer.flush(math.inf)
        assert len(drain(consumer, 15)) == 15
        consumer.commit()
        assert rows(admin, "endless") == {0: 15}


def test_paused_queues_wait(node: Node, admin: Admin) -> None:
    admin.topic_create("paused", 2)
    for queue in range(2):
        send(node, "paused", 10, queue=queue)
    with Consumer("paused", group="paused", node=node.address) as consumer:
        eventually(lambda: len(consumer.assignment) == 2, "it has joined")
        consumer.pause([("paused", 1)])
        assert consumer.paused == [("paused", 1)]
        assert {one.queue_id for one in drain(consumer, 10)} == {0}
        assert not consumer.poll(0.3)
        consumer.pause()
        send(node, "paused", 3, queue=0)
        assert not consumer.poll(0.3)
        consumer.resume([("paused", 1)])
        assert {one.queue_id for one in drain(consumer, 10)} == {1}
        consumer.resume()
        assert {one.queue_id for one in drain(consumer, 3)} == {0}
        assert consumer.paused == []
        with pytest.raises(ValueError, match="not assigned"):
            consumer.pause([("paused", 7)])


def test_the_asynchronous_consumer_tells_and_pauses_too(node: Node, admin: Admin) -> None:
    admin.topic_create("async-told", 2)
    for queue in range(2):
        send(node, "async-told", 10, queue=queue)

    async def main() -> None:
        told: list[Any] = []

        async def assign(queues: list[tuple[str, int]]) -> None:
            await asyncio.sleep(0.01)
            told.append(("+", queues))
            await consumer.seek("async-told", 0, 4)

        async def revoke(queues: list[tuple[str, int]]) -> None:
            told.append(("-", sum((await consumer.commit()).values())))

        consumer = AsyncConsumer(
            "async-told", group="async-told", node=node.address, auto_commit=False, on_assign=assign, on_revoke=revoke
        )
        async with consumer:
            async with asyncio.timeout(30):
                while len(consumer.assignment) < 2:
                    await asyncio.sleep(0.05)
                consumer.pause([("async-told", 1)])
                assert consumer.paused == [("async-told", 1)]
                count = 0
                while count < 6:
                    count += len(await consumer.poll(0.3))
                assert count == 6
                consumer.resume()
                while count < 16:
                    count += len(await consumer.poll(0.3))
        assert told == [("+", [("async-told", 0), ("async-told", 1)]), ("-", 20)]

    asyncio.run(main())


def test_a_single_bar_in_a_filter_is_refused_with_what_is_meant(node: Node) -> None:
    with pytest.raises(ValueError, match=r"'a \|\| b'"):
        Reader("t", node=node.address, filter="a | b")
    with Producer(node.address) as producer:
        producer.send("bars", b"x", tags="a|b")
    with Reader("bars", node=node.address, filter=MessageSelector("TAG", "a|b")) as consumer:
        assert len(drain(consumer, 1)) == 1
    with Reader("bars", node=node.address, filter="a || b") as consumer:
        assert not consumer.poll(0.3)


def test_a_topic_that_is_named_twice_is_one(node: Node) -> None:
    send(node, "twice", 5)
    with Reader(["twice", "twice"], node=node.address) as consumer:
        assert consumer.assignment == [("twice", 0)]
        assert len(drain(consumer, 5)) == 5
    with Reader(queues=[("twice", 0), ("twice", 0)], node=node.address) as consumer:
        assert len(drain(consumer, 5)) == 5
