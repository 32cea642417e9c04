"""Goal: EIO, ENOSPC and a short write at every place that writes, syncs or renames cost nothing that was acknowledged, are
said in the log, and are over with the next try.

Method: a real node under the load of the power cuts' tests, which has queues of every kind, idempotent producers, topics
that come and go and a group. Each place errs once, at a hit that the seed says, with an error that the place can have; the
node must get over all of them without the death of a process. Then its store is recovered and held against all that the
node had said. A failed fdatasync of the log, which nothing gets over, is in ``test_io_errors``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import time
from pathlib import Path

import pytest
from power_check import Recovered, check, config_of
from power_load import BATCHES, SETTINGS, Load, Said
from test_kill9 import FAILPOINTS
from traffic import seed

from commitmq import Admin
from commitmq.errors import CommitMQError
from nodes import eventually, start_node
from shares import shared

WRITE = ("short:7", "errno:EIO", "errno:ENOSPC")
OTHER = ("errno:EIO", "errno:ENOSPC")
# Which errors a place can have, and between which hits one comes.
PLACES = {
    "disk.reserve.segment:before": (OTHER, 3, 4),
    "disk.rename.segment:before": (OTHER, 3, 4),
    "batch_queue.append": (WRITE, 5, 20),
    "batch_queue.before_create": (OTHER, 2, 2),
    "batch_queue.before_fdatasync": (OTHER, 2, 4),
    "batch_queue.inside_create": (OTHER, 2, 2),
    "checkpoint.before_fdatasync": (OTHER, 2, 3),
    "checkpoint.write": (WRITE, 2, 3),
    "disk.replace.dispatcher_state:before": (OTHER, 2, 2),
    "dispatcher_state.write": (WRITE, 2, 2),
    "flush.before_checkpoint": (OTHER, 2, 3),
    "index.before_allocate": (OTHER, 2, 4),
    "index.before_fdatasync": (OTHER, 1, 2),
    "index.before_rename": (OTHER, 2, 2),
    "index.create": (WRITE, 2, 2),
    "disk.replace.index_state:before": (OTHER, 2, 2),
    "index_state.write": (WRITE, 2, 2),
    "journal.after_snapshot": ((), 2, 3),  # no system call, so it only dies there
    "journal.append": (WRITE, 3, 9),
    "journal.before_fdatasync": (OTHER, 3, 9),
    "journal.write": (WRITE, 2, 5),
    "disk.replace.journal:before": (OTHER, 2, 3),
    "disk.replace.json:after": (OTHER, 3, 6),
    "disk.replace.json:before": (OTHER, 3, 6),
    "disk.sync.json:after": (OTHER, 3, 6),
    "disk.sync.json:before": (OTHER, 3, 6),
    "json.write": (WRITE, 3, 6),
    "members.append": (WRITE, 1, 2),
    "disk.replace.members:before": (OTHER, 1, 1),
    "members.write": (WRITE, 1, 1),
    "disk.replace.producers:after": (OTHER, 2, 3),
    "disk.sync.producers:before": (OTHER, 2, 3),
    "disk.replace.producers:before": (OTHER, 2, 3),
    "producers.write": (WRITE, 2, 3),
    "queue.append": (WRITE, 20, 60),
    "queue.before_create": (OTHER, 4, 8),
    "queue.before_fdatasync": (OTHER, 4, 9),
    "queue.inside_create": (OTHER, 4, 8),
    "queue_ext.append": (WRITE, 20, 60),
    "queue_ext.before_create": (OTHER, 4, 8),
    "queue_ext.before_fdatasync": (OTHER, 4, 9),
    "queue_ext.inside_create": (OTHER, 4, 8),
    "sidecar.before_fdatasync": (OTHER, 2, 3),
    "sidecar.write": (WRITE, 2, 3),
    "disk.replace.subscriptions:before": (OTHER, 1, 1),
    "subscriptions.write": (WRITE, 1, 1),
    "topics.after_fdatasync": (OTHER, 3, 6),
    "topics.after_snapshot": ((), 1, 2),
    "topics.append": (WRITE, 3, 6),
    "topics.before_fdatasync": (OTHER, 3, 6),
    "writer.before_answer": ((), 20, 60),  # no system call, so it only dies there
}


# After the failed sync of a queue of any kind nothing of queues is synced any more until the next start.
SYNCS = ("queue.before_fdatasync", "batch_queue.before_fdatasync", "queue_ext.before_fdatasync")
REASONS = "|".join(os.strerror(one) for one in (errno.EIO, errno.ENOSPC))
# What the log says, by what the place's name matches first.
SAID = {
    "disk.reserve.segment": "cannot allocate a segment",
    "disk.rename.segment": "cannot allocate a segment",
    "disk.replace.dispatcher_state": "cannot write the dispatcher's state",
    "disk.replace.index_state": "cannot write the state of the index",
    "disk.replace.journal": "could not be written",
    "disk.replace.json": "could not be written",
    "disk.replace.members": "could not be written",
    "disk.replace.subscriptions": "could not be written",
    "disk.replace.producers": "cannot write the snapshot of idempotent producers",
    "disk.sync.json": "could not be written",
    "disk.sync.producers": "cannot write the snapshot of idempotent producers",
    "queue.append": "cannot append to the queue",
    "queue_ext.append": "cannot append to the queue",
    "queue.before_fdatasync": "cannot flush the queue",
    "queue_ext.before_fdatasync": "cannot flush the queue",
    "queue.": "cannot make a file of the queue",
    "queue_ext.": "cannot make a file of the queue",
    "checkpoint.": "cannot write the checkpoint",
    "sidecar.": "cannot write the checkpoint",
    "flush.before_checkpoint": "cannot write the checkpoint",
    "flush.commit": "cannot write to the log",
    "dispatcher_state.": "cannot write the dispatcher's state",
    "index.before_fdatasync": "fdatasync of an index file failed",
    "index.": "an index file",
    "index_state.": "cannot write the state of the index",
    "min_offset.": "cannot write the log's minimum",
    "journal.": "could not be written",
    "json.": "could not be written",
    "members.": "could not be written",
    "producers.": "cannot write the snapshot of idempotent producers",
    "subscriptions.": "could not be written",
    "topics.": "could not be written",
}


def life(tmp_path: Path, actions: dict[str, str], number: int, **settings: object) -> str:
    """One life of a node in which each of ``actions`` happens once, under load; what is left is held against what it said.

    Returns the node's log.
    """
    chance = random.Random(number)
    fired = tmp_path / "fired"
    fired.mkdir()
    points = ";".join(f"{name}={action}@{chance.randint(*PLACES[name][1:])}" for name, action in actions.items())
    extra = {"COMMITMQ_FAILPOINTS": points, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    every = {**SETTINGS, **settings}
    said = Said()

    def missing() -> list[str]:
        return sorted(actions.keys() - {one.name for one in fired.iterdir()})

    with start_node(tmp_path, *(f"{name}={str(value).lower()}" for name, value in every.items()), **extra) as node:
        make_batches(node.address)
        load = Load(node.address, said, str(number), sees_unflushed=every.get("commit_log.flush_mode") == "async")
        try:
            deadline = time.monotonic() + 60
            while missing() and not load.trouble:
                assert time.monotonic() < deadline, f"not met: {missing()}"
                time.sleep(0.05)
            enough = max(len(said.acked) + 20, 200)
            eventually(lambda: len(said.acked) > enough or load.trouble, "the node takes messages again", timeout_s=40)
        finally:
            load.end()
        eventually(node.is_ready, "the node is whole again", timeout_s=40)
        ended = node.stop()
        assert (ended.returncode == 0) == (not any("errno" in actions.get(one, "") for one in SYNCS)), ended.stderr
        text = node.log()
    recovered = Recovered(tmp_path / "store", config_of(every))
    checked = check(recovered, said, time.monotonic_ns(), power=False)
    assert checked > 100, "too little happened to show anything"
    return text


def make_batches(address: str) -> None:
    """The topic of inner batches, also where a place at its making errs or dies."""

    def made() -> bool:
        with contextlib.suppress(CommitMQError), Admin(address, timeout_s=2) as admin:
            admin.topic_create(BATCHES, 1, attributes={"queue.type": "BatchCQ"})
            return True
        return False

    eventually(made, "the topic can be made", timeout_s=20)


def check_errors(text: str, errors: dict[str, str]) -> None:
    """No process died of them, and each was said."""
    deaths = [line for line in text.splitlines() if "worker died" in line]
    # An index file whose sync failed is made anew by a new process.
    allowed = [line for line in deaths if "dispatcher-index" in line][: "index.before_fdatasync" in errors]
    assert deaths == allowed, "an error of the device is no reason to die"
    for name, action in errors.items():
        told = next(words for start, words in SAID.items() if name.removeprefix("batch_").startswith(start))
        waits = "waits for room on the disk" if "ENOSPC" in action else told
        # One that follows another of the same worker before that one is over is not said again.
        assert action.startswith("short") or re.search(f"({told}|{waits}).*({REASONS})", text), f"{name} said nothing"


def draw(number: int) -> dict[str, str]:
    """An error for each place, and of the syncs of queues only one."""
    chance = random.Random(number)
    sync = chance.choice(SYNCS)
    every = {name: errors for name, (errors, _, _) in PLACES.items() if errors and (name == sync or name not in SYNCS)}
    return {name: chance.choice(errors) for name, errors in every.items()}


def test_each_place_errs_once(tmp_path: Path) -> None:
    number = seed()
    errors = draw(number)
    check_errors(life(tmp_path, errors, number), errors)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("run", shared(range(6), 1))
def test_each_place_errs_in_many_ways(tmp_path: Path, run: int) -> None:
    number = seed() + run
    errors = draw(number)
    check_errors(life(tmp_path, errors, number, **{"commit_log.flush_mode": ("sync", "async")[run % 2]}), errors)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_process_dies_at_each_place(tmp_path: Path) -> None:
    life(tmp_path, dict.fromkeys(PLACES, "kill"), seed())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", shared(range(8), 1))
def test_a_node_dies_at_each_place(tmp_path: Path, part: int) -> None:
    """The places that ``test_kill_node`` does not know."""
    names = sorted(PLACES.keys() - FAILPOINTS.keys())[part::8]
    life(tmp_path, dict.fromkeys(names, "kill_node"), seed() + part)
