"""Goal: message semantics hold together, whatever dies: every stored message is handled at least once or is a dead letter, no
message of a rolled-back transaction is ever seen, none comes early, each is appended to its topic once, and the messages of a
sharding key are handled in their order, by members that own a queue and by consumers that share it in order.

Method: a model. Five producers send plain messages, batches, delays, transactions, keyed messages and some whose properties
nearly fill a record; eight consumers handle them, fail as each message wants it, and are killed, ended and started at random;
processes of the node die at failpoints that the seed chooses. Meanwhile the disk is full, the clock is wrong by seconds, an
hour or days, and the power goes. In the end no process has ended by an exception of its own, and the store verifies.
COMMITMQ_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from calamities import Machine, copy, small_disk

from commitmq import Admin
from nodes import Node, commitmq, eventually, free_ports, started
from semantics_model import (
    IN_LINE,
    ORDERED,
    PRODUCERS,
    QUEUES,
    SHARED,
    WORK,
    Fleet,
    Ledger,
    Sender,
    assert_order,
    check,
    unfinished,
)

pytestmark = pytest.mark.timeout(420)
KINDS = ("plain", "full", "batch", "level", "timer", "ordered", "shared", "in_line", "transaction", "rollback")
TOPICS = (WORK, ORDERED, SHARED, IN_LINE)
STEPS = 28
SETTINGS = (
    "topics.default_queues=4",
    "supervisor.restart_backoff_max_ms=300",
    "groups.heartbeat_interval_ms=200",
    "groups.session_timeout_ms=3000",
    "groups.disconnect_grace_ms=500",
    "schedule.persist_interval_ms=200",
    "transaction.timeout_ms=1000",
    "transaction.check_interval_ms=1000",
    "transaction.op_interval_ms=300",
    "retention.hours=8760",  # a clock that is wrong by days must not make messages old
    "retention.clean_forcibly=false",  # nor may a full disk delete what nobody has read
)
PLACES = (
    "schedule.before_put",
    "schedule.after_put",
    "schedule.between_files",
    "timer.before_put",
    "timer.after_put",
    "timer.between_files",
    "timer.after_flush",
    "transaction.before_commit",
    "transaction.after_commit",
    "transaction.before_op",
    "transaction.after_op",
    "transaction.before_answer",
    "transaction.after_positions",
    "pop.before_put",
    "pop.after_put",
    "pop.before_copy",
    "pop.after_copy",
    "pop.before_order",
    "pop.after_order",
    "pop.after_order_commit",
    "writer.before_append",
    "writer.after_append",
    "writer.after_publish",
    "flush.before_fdatasync",
    "dispatcher.consume_queue.before_dispatch",
)
OFTEN = ("writer.before_append", "writer.after_append", "dispatcher.consume_queue.before_dispatch")
"""Places that every life passes often."""
SEEDS = (1, 2, pytest.param(3, marks=pytest.mark.slow))
"""One life of kills and one that loses its power each time, a third with the slow tests, fifty more before a release."""
CALAMITIES = 3


def live(folder: Path, seed: int) -> Path:
    """One life. The result is the store that it left, after an orderly stop, on the test's own disk."""
    kept = folder / "store"
    kept.mkdir()
    with small_disk(folder / "disk") as disk:
        node = Node(disk / "store", *SETTINGS, f"network.port={free_ports()}")
        _live(node, disk, folder, seed)
        copy(node.store, kept)
        verified = commitmq("store", "verify", str(node.store))
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert own_deaths(node.log()) == []
    return kept


def own_deaths(log: str) -> list[str]:
    """The lines of ``node.log`` that tell of a process which ended otherwise than by SIGKILL, which only the test sends."""
    return [line for line in log.splitlines() if (" died" in line and "SIGKILL" not in line) or "Traceback" in line]


def _live(node: Node, disk: Path, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    loses_power = seed % 2 == 0
    machine = Machine(node, disk, folder, seed, recorded=loses_power)
    fired = folder / "fired"
    consumers = folder / "consumers"
    for made in (fired, consumers):
        made.mkdir()
    # A node that is recorded may not be killed whole at a failpoint: some process would hold the recorder's lock.
    deaths = ["kill"] if loses_power else ["kill", "kill", "kill_node"]
    points = [f"{place}={chance.choice(deaths)}@{chance.randrange(1, 30)}" for place in chance.sample(PLACES, 4)]
    if not any(place.startswith(OFTEN) for place in points):  # the others may be reached too seldom to kill anything
        points.append(f"{OFTEN[seed % len(OFTEN)]}=kill@{10 + seed % 20}")
    failpoints = {"COMMITMQ_FAILPOINTS": ";".join(points), "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    ledger = Ledger()
    with started(node, **failpoints, **machine.environment()):
        with Admin(node.address) as admin:
            for topic in TOPICS:
                admin.topic_create(topic, QUEUES)
        fleet = Fleet(node, consumers, TOPICS, seed)
        story = list(points)
        try:
            senders = [Sender(node, ledger, KINDS, number, seed, STEPS) for number in range(PRODUCERS)]
            for sender in senders:
                sender.start()
            for calamity in range(CALAMITIES):
                time.sleep(chance.random())
                fleet.stir()
                story.append(machine.suffer())
                if loses_power and calamity == 1:
                    machine.cut_power(**failpoints)
                    story.append("power cut")
            while any(sender.is_alive() for sender in senders):
                time.sleep(chance.random())
                fleet.stir()
            assert [error for sender in senders for error in sender.trouble] == [], story
            for _ in range(4):
                fleet.stir()
                time.sleep(chance.random())
            eventually(node.is_ready, f"the node is whole again after {story}", timeout_s=60)
            fleet.whole()
            eventually(
                lambda: not unfinished(node, ledger, fleet, TOPICS),
                f"every message is done after {story}: {len(ledger.entries)} messages",
                timeout_s=120,
            )
            time.sleep(2.0)  # what comes a second time, or must not come at all, would come now
        except AssertionError as error:
            late = [ledger.entries[one] for one in sorted(unfinished(node, ledger, fleet, TOPICS))]
            tries = [line for topic in TOPICS for line in fleet.tries(topic) if line[1] in {one.id for one in late}]
            error.add_note(f"--- what befell the node: {story}\n--- not done: {late}\n--- their tries: {tries}")
            (folder / "left").mkdir()
            copy(node.store, folder / "left")  # the disk goes with the test
            raise
        finally:
            fleet.end()
        check(node, ledger, fleet, TOPICS, may_be_early=machine.may_be_early)
    assert len(ledger.of("stored")) > len(ledger.entries) * 0.5, "the model must not pass because nothing was stored"
    assert list(fired.iterdir()), "something died"


def test_a_broken_order_is_seen() -> None:
    def line(number: int, word: str = "ok") -> list[object]:
        return [word, number, 0, 0.0, "key", number]

    assert_order([line(0), line(1, "fail"), line(0), line(1), line(3)])
    with pytest.raises(AssertionError, match="key"):
        assert_order([line(0), line(2), line(1)])


@pytest.mark.parametrize("seed", SEEDS)
def test_semantics_hold_whatever_dies(seed: int, tmp_path: Path) -> None:
    live(tmp_path, int(os.environ.get("COMMITMQ_SEED") or seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 150))
def test_semantics_hold_for_fifty_seeds(seed: int, tmp_path: Path) -> None:
    live(tmp_path, seed)
