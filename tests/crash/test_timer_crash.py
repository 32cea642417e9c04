"""Goal: whatever dies while messages with times of their own are taken in, delivered or rolled, each is delivered once.

Method: messages with delays of up to four seconds in several queues, sent in runs with a time per message; a roll window of
two seconds, so that many go round again. The timer process, the writer and the whole node
die at named places (failpoints); then the topic is read as a whole. Further cases lose or damage the wheel, the timer log and
the positions.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from commitmq import Admin, Producer
from delays import Peer, everything
from mover_crashes import QUEUES, TOPIC, check_each_once, dying_node, make_topic, places, wait_for_death
from nodes import Node, eventually, started
from shares import shared

pytestmark = pytest.mark.timeout(240)
EACH, RUNS = 45, 2
SETTINGS = (
    "timer.persist_interval_ms=50",
    "timer.batch_messages=25",
    "timer.roll_window_s=2",
    "timer.log_file_bytes=1040",
    "supervisor.restart_backoff_max_ms=300",
)
FIRST = ("timer.after_put=kill@3", "timer.between_files=kill_node@6")
SLOW = (
    "timer.before_put=kill@2",
    "writer.after_append=kill@9",
    "timer.after_put=kill@9",
    "timer.after_flush=kill@3",
    "timer.after_put=kill_node@4",
    "writer.after_append=kill_node@11",
)
LONG = (
    "timer.before_put=kill@11",
    "timer.between_files=kill@1",
    "timer.before_making_again=kill@1",
    "timer.after_flush=kill_node@5",
    "timer/disk.replace.timercheck:before=kill@2",
    "timer/disk.replace.timercheck:after=kill@3",
    "timer/disk.sync.timerlog:before=kill@4",
    "timer/disk.sync.timerwheel:before=kill@2",
    "timer/timerwheel.write=kill@2",
    "timer/timerlog.write=kill@7",
    "writer.before_append=kill@9",
    "writer.after_publish=kill@10",
    "flush.before_fdatasync=kill@4",
    "dispatcher.consume_queue.before_dispatch=kill@6",
    "timer.after_put=stop@2",
)


def send_all(node: Node, start_ms: int = 300) -> dict[bytes, int]:
    """Messages in every queue, each with its time in ms; the first ones are due in ``start_ms``."""
    sent: dict[bytes, int] = {}
    with Peer(node) as peer:
        for number in range(RUNS):
            for queue in range(QUEUES):
                now = time.time_ns() // 1_000_000
                due = {b"%d-%d-%d" % (number, queue, index): now + start_ms + 60 * index for index in range(EACH)}
                properties = [b"TIMER_DELIVER_MS\x01%d\x02" % at for at in due.values()]
                answer = peer.append_with(TOPIC, list(due), properties, queue)
                assert answer["ok"], answer
                assert answer["stored_topic"] == "rmq_sys_wheel_timer"
                sent |= due
    return sent


def check(node: Node, sent: dict[bytes, int]) -> None:
    stored = check_each_once(node, "timer", sent)
    early_ms = [sent[one.body] - one.store_timestamp for one in stored if one.store_timestamp < sent[one.body]]
    assert not early_ms, "none early"


@pytest.mark.parametrize("place", places(FIRST[:2], SLOW[:1], (*FIRST[2:], *SLOW[1:], *LONG)))
def test_each_message_is_delivered_once(tmp_path: Path, place: str) -> None:
    with dying_node(tmp_path, SETTINGS, place) as node:
        sent = send_all(node)
        wait_for_death(node, tmp_path, place)
        check(node, sent)


LETTERS = "%DLQ%CMQ_UNDELIVERED"


@pytest.mark.parametrize("place", shared(["timer.before_put=kill@4", "timer.after_put=kill@4"], 1))
def test_what_its_topic_does_not_take_any_more_is_a_dead_letter_once(tmp_path: Path, place: str) -> None:
    """The topic becomes read-only while its messages wait. The timer dies around the puts of the dead letters."""
    with dying_node(tmp_path, (*SETTINGS, "topics.auto_create=false"), place) as node:
        with Admin(node.address) as admin:
            admin.topic_create("other", 1)
            with Producer(node.address) as producer:
                stays = [b"other %d" % number for number in range(4)]
                for body in stays:
                    producer.send("other", body, delay=4)
            sent = send_all(node, start_ms=3_000)
            admin.topic_update(TOPIC, perm=4)
            wait_for_death(node, tmp_path, place)
            check_each_once(node, "timer", sent, LETTERS)
            check_each_once(node, "timer", stays, "other")
            letters = admin.dlq_list("CMQ_UNDELIVERED", max_messages=1_000)
        assert {letter.topic for letter in letters} == {TOPIC}
        assert len(letters) == len(sent)


def lose_positions(store: Path) -> None:
    for path in (store / "commitmq" / "timer.json", store / "commitmq" / "timer.json.bak", store / "config/timercheck"):
        path.unlink(missing_ok=True)


def damage_positions(store: Path) -> None:
    (store / "config" / "timercheck").write_bytes(b"")
    for path in (store / "commitmq").glob("timer.json*"):
        path.write_bytes(b'{"is_whole":')


def lose_own_positions(store: Path) -> None:
    for path in (store / "commitmq" / "timer.json", store / "commitmq" / "timer.json.bak"):
        path.unlink(missing_ok=True)


def lose_wheel(store: Path) -> None:
    (store / "timerwheel").unlink()


def cut_wheel(store: Path) -> None:
    os.truncate(store / "timerwheel", 4096)


def zero_wheel(store: Path) -> None:
    size = (store / "timerwheel").stat().st_size
    os.truncate(store / "timerwheel", 0)
    os.truncate(store / "timerwheel", size)


def lose_log(store: Path) -> None:
    for path in (store / "timerlog").iterdir():
        path.unlink()


def damage_log(store: Path) -> None:
    for path in (store / "timerlog").iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)


DAMAGES = (
    damage_positions,
    zero_wheel,
    lose_positions,
    lose_own_positions,
    lose_wheel,
    cut_wheel,
    lose_log,
    damage_log,
)


@pytest.mark.parametrize(
    "damage",
    shared(DAMAGES, 1),
)
def test_the_queue_alone_is_enough(tmp_path: Path, damage: object) -> None:
    node = Node(tmp_path / "store", *SETTINGS)
    with started(node):
        make_topic(node)
        sent = send_all(node)
        eventually(lambda: len(everything(node, TOPIC)) > 20, "some are delivered")
        node.kill_all()
        damage(node.store)  # type: ignore[operator]
        assert node.start().returncode == 0
        check(node, sent)
        assert "makes wheel and timer log from the queue" in node.log()
