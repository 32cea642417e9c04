"""Goal: whatever is created, deleted, sent, consumed and killed, each life of a topic keeps what was acknowledged in it.

Method: real nodes, seeded (COMMITMQ_SEED repeats a run); see topic_lives for what is sent and what must hold. At the end
`store verify` finds the store sound, and `store rebuild` makes the same queues from the log alone.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from test_topic_life import SETTINGS, check_stopped_store
from topic_lives import Lives, Topic
from traffic import seed

from commitmq.supervision.exit_codes import CliExit
from nodes import Node, start_node

KINDS = ("single", "batch", "async", "idempotent", "memory", "batch_cq")
ROLES = ("writer", "coordinator", "dispatcher-consume_queue", "reader-0", "dispatcher-memory", "flush")


def _kill(node: Node, role: str) -> None:
    os.kill(node.pids()[role], signal.SIGKILL)


def _kill_all(node: Node, lives: Lives) -> None:
    node.kill_all()
    for topic in lives.topics.values():
        topic.wiped = topic.wiped or topic.kind == "memory"
    assert node.start().returncode == CliExit.OK


def run(tmp_path: Path, kinds: tuple[str, ...], rounds: int, deaths: tuple[str, ...]) -> None:
    """In each round some topics end, two at once, many times or once, while a process dies; then all are looked at."""
    number = seed()
    chance = random.Random(number)
    with start_node(
        tmp_path, *SETTINGS, "supervisor.restart_backoff_ms=20", "supervisor.restart_backoff_max_ms=200"
    ) as node:
        topics = [Topic(f"{kind}-{number % 1000}", kind) for kind in kinds]
        with Lives(node, number, topics) as lives:
            for _ in range(rounds):
                for topic in topics:
                    topic.go.set()
                ending = chance.sample(topics, chance.randint(1, len(topics)))
                for topic in ending:
                    lives.send_until(topic, chance.randint(1, 100))
                death = chance.choice(deaths)
                when = chance.randrange(len(ending))
                for at, topic in enumerate(ending):
                    if at == when and death in ROLES:
                        _kill(node, death)
                    for _again in range(chance.choice((1, 1, 1, 10))):
                        lives.end(topic)
                if death == "all":
                    _kill_all(node, lives)
                for topic in ending:
                    lives.send_until(topic, chance.randint(1, 100))
                for topic in topics:
                    lives.check(topic)
            assert not lives.trouble
        assert node.stop().returncode == CliExit.OK
    check_stopped_store(tmp_path / "store")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kinds", [KINDS[:3], KINDS[3:]], ids=lambda kinds: "-".join(kinds))
def test_each_life_keeps_what_was_acknowledged_in_it(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    run(tmp_path, kinds, 2, ("writer", "coordinator", "dispatcher-consume_queue"))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(5))
def test_many_lives_of_all_kinds_while_everything_dies(tmp_path: Path, part: int) -> None:
    run(tmp_path, KINDS, 6, (*ROLES, "all"))
