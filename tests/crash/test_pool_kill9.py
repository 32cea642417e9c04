"""Goal: with the transient store pool too, SIGKILL of any process, or of all of them, at any moment loses nothing that was
acknowledged, and stores nothing twice, torn or out of order.

Method: that of ``test_kill9``, with a pool that is small enough to be full now and then, and its own places to die at. After
each run nothing of the pool may be left, and the files must be those of any other store.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from test_kill9 import SETTINGS, VICTIMS, check_everything, kill
from traffic import Traffic, seed

from commitmq.store.layout import StoreLayout
from commitmq.store.log.transient_pool import note_path, pool_folder
from nodes import Node, eventually, start_node
from shares import shared

POOL = (
    "commit_log.transient_store_pool=true",
    "commit_log.transient_store_pool_size=3",
)
# Each kills its process, or its node, once, at a hit that is drawn between the two numbers.
UNDER_LOAD = {
    "flush.before_commit": (10, 60),
    "flush.inside_commit": (10, 60),
    "flush.after_commit": (10, 60),
    "flush.before_zero": (10, 60),
    "flush.before_give_back": (2, 4),
    "flush.commit": (10, 60),
    "pool.after_take": (2, 4),
}
AT_RECOVERY = (
    "recovery.before_takeover",
    "recovery.takeover",
    "recovery.after_takeover",
    "pool.inside_remove",
    "pool.before_make",
    "pool.before_owner",
)
SAMPLE = ("flush.inside_commit", "flush.before_zero", "pool.after_take")


def check_closed(node: Node, traffic: Traffic) -> None:
    layout = StoreLayout(node.store)
    check_everything(node, traffic)
    assert not pool_folder(layout).exists(), "a stopped node keeps memory"
    assert not note_path(layout).exists()


def die_at_each(tmp_path: Path, names: list[str], action: str, flush_mode: str) -> None:
    """``action`` at each of ``names`` once, under load; whoever died is started again."""
    number = seed()
    chance = random.Random(number)
    fired = tmp_path / "fired"
    fired.mkdir()
    points = ";".join(f"{name}={action}@{chance.randint(*UNDER_LOAD[name])}" for name in names)
    extra = {"COMMITMQ_FAILPOINTS": points, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with start_node(tmp_path, *SETTINGS, *POOL, f"commit_log.flush_mode={flush_mode}", **extra) as node:
        with Traffic(node.address, number).running() as traffic:
            eventually(
                lambda: len(list(fired.iterdir())) == len(names) or traffic.check(),  # type: ignore[func-returns-value]
                f"all of {points} fire",
                timeout_s=80,
            )
            eventually(node.is_ready, "the node is whole again", timeout_s=40)
            traffic.wait_for_sends()
        check_closed(node, traffic)


def test_killed_at_the_places_of_the_pool(tmp_path: Path) -> None:
    die_at_each(tmp_path, sorted(UNDER_LOAD), "kill", "async")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_at_the_places_of_the_pool_in_sync_mode(tmp_path: Path) -> None:
    die_at_each(tmp_path, sorted(UNDER_LOAD), "kill", "sync")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flush_mode", shared(["async", "sync"], 1))
def test_a_node_killed_at_the_places_of_the_pool(tmp_path: Path, flush_mode: str) -> None:
    die_at_each(tmp_path, sorted(UNDER_LOAD), "kill_node", flush_mode)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "points",
    [pytest.param(AT_RECOVERY[:1], marks=pytest.mark.slow), pytest.param(AT_RECOVERY, marks=pytest.mark.long)],
    ids=["one", "all"],
)
def test_killed_while_it_takes_the_pool_over(tmp_path: Path, points: tuple[str, ...]) -> None:
    """All is in the pool when the node dies, because nothing commits; then every start dies once more."""
    number = seed()
    fired = tmp_path / "fired"
    fired.mkdir()
    with start_node(tmp_path, *SETTINGS, *POOL) as node:
        with Traffic(node.address, number).running() as traffic:
            traffic.wait_for_sends(20)
            pids = node.pids()
            os.kill(pids["flush"], signal.SIGSTOP)
            time.sleep(0.3)
            node.kill_all(known=True)
            names = ";".join(f"{point}=kill@1" for point in points)
            node.command_timeout_s = 200  # each death is another start
            ended = node.start(COMMITMQ_FAILPOINTS=names, COMMITMQ_FAILPOINTS_ONCE=str(fired))
            for _ in range(len(points) // 3):
                if ended.returncode:  # a recovery that dies three times fails the start; the next one goes on
                    ended = node.start(COMMITMQ_FAILPOINTS=names, COMMITMQ_FAILPOINTS_ONCE=str(fired))
            assert ended.returncode == 0, ended.stderr
            assert {one.name for one in fired.iterdir()} == set(points)
            assert "that a killed node had in its transient store pool" in node.log()
            traffic.wait_for_sends(20)
        check_closed(node, traffic)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", shared(range(2), 0))
@pytest.mark.parametrize("flush_mode", ["sync", "async"])
def test_random_processes_killed_at_random_moments(tmp_path: Path, flush_mode: str, run: int) -> None:
    """Processes, now and then all of them; the flush process is often halted before, so that much is in the pool only."""
    number = seed() + run
    chance = random.Random(number)
    with start_node(tmp_path, *SETTINGS, *POOL, f"commit_log.flush_mode={flush_mode}") as node:
        with Traffic(node.address, number).running() as traffic:
            traffic.wait_for_sends(20)
            for _ in range(10):
                time.sleep(chance.random() * 0.4)
                before = node.pids()
                if chance.random() < 0.4 and "flush" in before:
                    os.kill(before["flush"], signal.SIGSTOP)
                    time.sleep(chance.random() * 0.3)
                if chance.random() < 0.3:
                    node.kill_all(known=True)
                    ended = node.start()
                    assert ended.returncode == 0, ended.stderr
                else:
                    victims = {
                        "flush",
                        *chance.sample([one for one in VICTIMS if one in before], chance.choice((1, 2))),
                    }
                    for role in sorted(victims & before.keys(), key=lambda _: chance.random()):
                        kill(node, role, before)
                    eventually(node.is_ready, f"healed after {victims}", timeout_s=40)
                traffic.wait_for_sends(3)
        check_closed(node, traffic)
