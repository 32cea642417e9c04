"""Goal: whatever dies while messages with times of their own are taken in, delivered or rolled, each is delivered once.

Method: messages with delays of up to four seconds in several queues, sent in runs with a time per message; a roll window of
two seconds, so that many go round again. The timer process, the writer and the whole node
die at named places (failpoints); then the topic is read as a whole. Further cases lose or damage the wheel, the timer log and
the positions.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from commitmq import Admin
from delays import Peer, everything
from nodes import Node, eventually, started

pytestmark = pytest.mark.timeout(240)
TOPIC, QUEUES, EACH, RUNS = "parcels", 2, 45, 2
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
PLACES = (
    FIRST[0],
    *(pytest.param(place, marks=pytest.mark.slow) for place in (*FIRST[1:], *SLOW[:3])),
    *(pytest.param(place, marks=pytest.mark.long) for place in (*SLOW[3:], *LONG)),
)


def send_all(node: Node) -> dict[bytes, int]:
    """Messages in every queue, each with its time in ms."""
    sent: dict[bytes, int] = {}
    with Peer(node) as peer:
        for number in range(RUNS):
            for queue in range(QUEUES):
                now = time.time_ns() // 1_000_000
                due = {b"%d-%d-%d" % (number, queue, index): now + 300 + 60 * index for index in range(EACH)}
                properties = [b"TIMER_DELIVER_MS\x01%d\x02" % at for at in due.values()]
                answer = peer.append_with(TOPIC, list(due), properties, queue)
                assert answer["ok"], answer
                assert answer["stored_topic"] == "rmq_sys_wheel_timer"
                sent |= due
    return sent


def check(node: Node, sent: dict[bytes, int]) -> None:
    def found() -> Counter[bytes]:
        return Counter(one.body for one in everything(node, TOPIC))

    eventually(lambda: len(found()) == len(sent), "every message is delivered", timeout_s=90)
    with Admin(node.address) as admin:
        status = {row["role"]: row for row in admin.status()["processes"]}["timer"]
    assert "left_out" not in status["info"], status
    twice = {body: times for body, times in found().items() if times > 1}
    assert not twice
    early = [one for one in everything(node, TOPIC) if one.store_timestamp < sent[one.body]]
    assert not early


@pytest.mark.parametrize("place", PLACES)
def test_each_message_is_delivered_once(tmp_path: Path, place: str) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    extra = {"COMMITMQ_FAILPOINTS": place, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with started(Node(tmp_path / "store", *SETTINGS), **extra) as node:
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, QUEUES)
        sent = send_all(node)
        eventually(lambda: any(fired.iterdir()), f"{place} fires", timeout_s=60)
        eventually(node.is_ready, "the node is whole again", timeout_s=60)
        check(node, sent)


def lose_positions(store: Path) -> None:
    for path in (store / "commitmq" / "timer.json", store / "commitmq" / "timer.json.bak", store / "config/timercheck"):
        path.unlink(missing_ok=True)


def lose_own_positions(store: Path) -> None:
    for path in (store / "commitmq" / "timer.json", store / "commitmq" / "timer.json.bak"):
        path.unlink(missing_ok=True)


def lose_wheel(store: Path) -> None:
    (store / "timerwheel").unlink()


def cut_wheel(store: Path) -> None:
    os.truncate(store / "timerwheel", 4096)


def lose_log(store: Path) -> None:
    for path in (store / "timerlog").iterdir():
        path.unlink()


def damage_log(store: Path) -> None:
    for path in (store / "timerlog").iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)


DAMAGES = (lose_positions, lose_own_positions, lose_wheel, cut_wheel, lose_log, damage_log)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(DAMAGES[0], marks=pytest.mark.slow),
        *(pytest.param(one, marks=pytest.mark.long) for one in DAMAGES[1:]),
    ],
)
def test_the_queue_alone_is_enough(tmp_path: Path, damage: object) -> None:
    node = Node(tmp_path / "store", *SETTINGS)
    with started(node):
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, QUEUES)
        sent = send_all(node)
        eventually(lambda: len(everything(node, TOPIC)) > 20, "some are delivered")
        node.kill_all()
        damage(node.store)  # type: ignore[operator]
        assert node.start().returncode == 0
        check(node, sent)
        assert "makes wheel and timer log from the queue" in node.log()
