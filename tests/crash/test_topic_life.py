"""Goal: a topic that is deleted while producers send to it ends at one place of the log, whatever dies meanwhile.

Method: real nodes. What was acknowledged after the deletion's answer must be readable at the offset that the answer named,
offsets of the new incarnation are gap-free from 0, `store verify` is sound and `store rebuild` makes the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from topic_lives import Lives, Topic

from commitmq import Admin, Consumer, Producer, Reader
from commitmq.errors import CommitMQError, FencedError, ProtocolError
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.queues.queue_files import list_queues
from commitmq.supervision.exit_codes import CliExit
from nodes import Node, commitmq, eventually, start_node

SETTINGS = (
    "network.port=0",
    "commit_log.segment_bytes=1048576",
    "consume_queue.file_bytes=20000",
    "index.hash_slots=1000",
    "index.max_items=20000",
)


def queue_bytes(store: Path) -> dict[str, str]:
    """A digest of what each queue's files hold, without the zeros behind it."""
    found = {}
    layout = StoreLayout(store)
    for root in (layout.consume_queue, layout.batch_consume_queue):
        for topic, queue, folder in list_queues(root):
            for path in sorted(folder.iterdir()):
                data = path.read_bytes().rstrip(b"\0")
                if data:
                    found[f"{root.name}/{topic}/{queue}/{path.name}"] = hashlib.sha256(data).hexdigest()
    return found


def read_all(node: Node, topic: str, count: int) -> dict[tuple[int, int], bytes]:
    """What a fresh consumer without a group reads, by queue and offset."""
    found: dict[tuple[int, int], bytes] = {}
    deadline = time.monotonic() + 30
    with Reader([topic], node=node.address, start="earliest") as consumer:
        while len(found) < count and time.monotonic() < deadline:
            for message in consumer.poll(timeout_s=1):
                assert (message.queue_id, message.queue_offset) not in found, "a place was delivered twice"
                found[message.queue_id, message.queue_offset] = message.body
    return found


def check_stopped_store(store: Path) -> None:
    """The store of a stopped node is sound, and its queues are what the log alone makes of them."""
    sizes = [f"--set={setting}" for setting in SETTINGS if not setting.startswith("network")]
    verified = commitmq("store", "verify", str(store), *sizes)
    assert verified.returncode == CliExit.OK, verified.stdout + verified.stderr
    before = queue_bytes(store)
    rebuilt = commitmq("store", "rebuild", str(store), *sizes)
    assert rebuilt.returncode == CliExit.OK, rebuilt.stdout + rebuilt.stderr
    assert "does not follow" not in rebuilt.stderr + rebuilt.stdout
    assert queue_bytes(store) == before


def test_what_is_acknowledged_after_a_deletion_is_readable(tmp_path: Path) -> None:
    """One sender with default settings, one deletion: the reproduction."""
    stop = threading.Event()
    acked: list[tuple[float, int, int, bytes]] = []  # when its send began, queue, offset, body
    with start_node(tmp_path, *SETTINGS) as node:

        def send() -> None:
            number = 0
            with Producer(node=node.address) as producer:
                while not stop.is_set():
                    body = b"%d" % number
                    number += 1
                    began = time.monotonic()
                    try:
                        result = producer.send("t", body)
                    except CommitMQError:
                        continue
                    acked.append((began, result.queue, result.queue_offset, body))

        sender = threading.Thread(target=send)
        sender.start()
        with Admin(node=node.address) as admin:
            for _ in range(2):
                before = len(acked)
                while len(acked) < before + 100:
                    time.sleep(0.01)
                admin.topic_delete("t")
                deleted = time.monotonic()
        before = len(acked)
        while len(acked) < before + 100:
            time.sleep(0.01)
        stop.set()
        sender.join()
        wanted = {(queue, offset): body for at, queue, offset, body in acked if at >= deleted}
        late = {(queue, offset) for at, queue, offset, body in acked if at < deleted}
        assert len(wanted) >= 100
        count = 0  # with those that began before the deletion's answer and were stored after it
        for queue in {queue for queue, _ in wanted}:
            offsets = sorted(offset for one, offset in wanted if one == queue)
            assert offsets == list(range(offsets[0], offsets[-1] + 1))
            assert offsets[0] == 0 or (queue, offsets[0] - 1) in late
            count += offsets[-1] + 1
        found = read_all(node, "t", count)
        assert {key: found.get(key) for key in wanted} == wanted
        for queue in {queue for queue, _ in found}:
            offsets = sorted(offset for one, offset in found if one == queue)
            assert offsets == list(range(len(offsets))), "gap-free from 0"
        node.kill_all()
        assert node.start().returncode == CliExit.OK
        found = read_all(node, "t", count)
        assert {key: found.get(key) for key in wanted} == wanted
        assert node.stop().returncode == CliExit.OK
    check_stopped_store(tmp_path / "store")


AT_COORDINATOR = ("deletion.decided", "deletion.buried", "deletion.before_finish", "deletion.finished")
AT_WRITER = ("writer.before_heard", "writer.after_heard")


def one_death_a_deletion(tmp_path: Path, action: str, points: tuple[str, ...]) -> None:
    """The process (or the node) dies once at each point, while a sender goes on; each time the topic is deleted anew."""
    fired = tmp_path / "fired"
    fired.mkdir()
    # The writer's own start and the topic's creation come before the first deletion; hits of a process count.
    names = ";".join(f"{point}={action}@{3 if point in AT_WRITER else 1}" for point in points)
    extra = {"COMMITMQ_FAILPOINTS": names, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    back_off = ("supervisor.restart_backoff_ms=20", "supervisor.restart_backoff_max_ms=200")
    with start_node(tmp_path, *SETTINGS, *back_off, **extra) as node:
        topic = Topic("t", "single")
        with Lives(node, 1, [topic]) as lives:
            topic.go.set()
            for _ in range(3 * len(points)):
                lives.send_until(topic, 10)
                lives.end(topic)
                if all((fired / point).exists() for point in points):
                    break
            lives.send_until(topic, 10)
            lives.check(topic)
        assert sorted(path.name for path in fired.iterdir()) == sorted(points)
        assert not lives.trouble
        assert node.stop().returncode == CliExit.OK
    check_stopped_store(tmp_path / "store")


@pytest.mark.slow
def test_coordinator_and_writer_die_between_any_two_steps_of_a_deletion(tmp_path: Path) -> None:
    one_death_a_deletion(tmp_path, "kill", (*AT_COORDINATOR, *AT_WRITER))


@pytest.mark.slow
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(AT_COORDINATOR[:3], marks=pytest.mark.long, id="first"),
        pytest.param((*AT_COORDINATOR[3:], *AT_WRITER), id="last"),
    ],
)
def test_the_node_dies_between_any_two_steps_of_a_deletion(tmp_path: Path, points: tuple[str, ...]) -> None:
    one_death_a_deletion(tmp_path, "kill_node", points)


def test_a_deletion_while_the_writer_is_paused_is_answered_in_time_and_finished_later(tmp_path: Path) -> None:
    """A halted writer can neither append nor say that it has heard: the answer says so, and the topic is gone all the same."""
    with start_node(tmp_path, *SETTINGS, "topics.delete_timeout_ms=300", "supervisor.hang_timeout_s=60") as node:
        with Producer(node=node.address) as producer, Admin(node=node.address) as admin:
            for number in range(10):
                producer.send("t", b"old %d" % number)
            incarnation = admin.topic("t").incarnation
            writer = node.pids()["writer"]
            os.kill(writer, signal.SIGSTOP)
            try:
                with pytest.raises(ProtocolError) as refused:
                    admin.topic_delete("t")
                assert refused.value.code == "SERVICE_NOT_AVAILABLE"
                assert "repeated" in refused.value.message
                assert admin.topics() == []
                with pytest.raises(ProtocolError) as refused:
                    admin.topic_create("t", 1)
                assert refused.value.code == "SERVICE_NOT_AVAILABLE"
            finally:
                os.kill(writer, signal.SIGCONT)
            with contextlib.suppress(ProtocolError):  # it waits for the end, unless that has come already
                admin.topic_delete("t")
            within(lambda: not json_config.load(StoreLayout(node.store).endings))
            result = producer.send("t", b"new")
            assert result.queue_offset == 0
            assert admin.topic("t").incarnation > incarnation
        assert read_all(node, "t", 1) == {(result.queue, 0): b"new"}
        assert node.stop().returncode == CliExit.OK
    check_stopped_store(tmp_path / "store")


def test_a_late_commit_of_a_deleted_topic_never_counts_in_the_next_one(tmp_path: Path) -> None:
    """A consumer that stood at 50 goes on in the topic made anew from its beginning, and so do all after it."""
    with start_node(tmp_path, *SETTINGS) as node, Admin(node=node.address) as admin:
        admin.topic_create("t", 1)
        with Producer(node=node.address) as producer:
            producer.send_batch("t", [b"old %d" % number for number in range(50)])
            with Consumer("t", group="g", node=node.address, auto_commit=False) as consumer:
                seen: list[bytes] = []
                within(lambda: seen.extend(one.body for one in consumer.poll(timeout_s=1)) or len(seen) == 50)  # type: ignore[func-returns-value]
                admin.topic_delete("t")
                admin.topic_create("t", 1)
                producer.send_batch("t", [b"new %d" % number for number in range(10)])
                with pytest.raises(FencedError):
                    consumer.commit()  # of the 50, which are of a topic that is gone
                assert admin.topic("t").groups == []
                seen.clear()
                within(lambda: seen.extend(one.body for one in consumer.poll(timeout_s=1)) or len(seen) >= 10)  # type: ignore[func-returns-value]
                assert seen == [b"new %d" % number for number in range(10)]
                assert consumer.gaps == []
                consumer.commit()
        assert [(row.committed, row.end) for row in admin.group_lag("g")] == [(10, 10)]
        with Reader([], queues=[("t", 0)], node=node.address, start="latest") as alone:
            assert len(alone.poll(timeout_s=0)) == 0
            admin.topic_delete("t")
            admin.topic_create("t", 1)
            with Producer(node=node.address) as producer:
                producer.send("t", b"newest")
            found: list[bytes] = []
            within(lambda: found.extend(one.body for one in alone.poll(timeout_s=1)) or bool(found))  # type: ignore[func-returns-value]
            assert found == [b"newest"]


def within(condition: Callable[[], object]) -> None:
    eventually(condition, "what was sent arrives")
