"""Goal: whatever becomes of topics between the runs of an export, it has every message that a run could see, once.

Method: a model. Topics are sent to, deleted, made anew with fewer messages or more, and given more queues, by chance;
after each run the export holds exactly the messages of all incarnations that were alive at some run.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commitmq.testing.node import CommitMQNode, start_node
from commitmq_plugins.spark.jobs.export import export, exported
from commitmq_plugins.spark.origins import ANEW
from shares import shared

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPICS = ("a", "b", "c")


class World:
    """What the topics are now, and what an export must have."""

    def __init__(self, node: CommitMQNode, seed: int) -> None:
        self.node = node
        self.chance = random.Random(seed)
        self.queues: dict[str, int] = {}
        self.alive: dict[str, list[bytes]] = {}
        self.ran: dict[str, bool] = {}  # whether a run has seen messages of what the topic is now
        self.was: set[str] = (
            set()
        )  # topics of which a run has seen messages of an earlier incarnation, and none of today's
        self.number = 0

    def step(self) -> None:
        topic = self.chance.choice(TOPICS)
        if topic not in self.alive:
            self.queues[topic] = self.chance.randint(1, 3)
            self.node.admin.topic_create(topic, self.queues[topic])
            self.alive[topic], self.ran[topic] = [], False
        action = self.chance.choice(("send", "send", "send", "grow", "delete"))
        if action == "send":
            bodies = [b"%d" % (self.number + one) for one in range(self.chance.choice((1, 7, 300)))]
            self.number += len(bodies)
            self.node.send_many(topic, bodies, queue=self.chance.randrange(self.queues[topic]))
            self.alive[topic] += bodies
        elif action == "grow":
            self.queues[topic] += 1
            self.node.admin.topic_update(topic, queues=self.queues[topic], force=True)
        else:
            self.node.admin.topic_delete(topic)
            if self.ran.pop(topic):
                self.was.add(topic)
            del self.alive[topic]

    def seen(self) -> tuple[set[bytes], set[str]]:
        """What a run sees now, and the topics that it finds made anew."""
        anew = {topic for topic in self.was if self.alive.get(topic)}
        self.was -= anew
        for topic, bodies in self.alive.items():
            self.ran[topic] |= bool(bodies)
        return {body for bodies in self.alive.values() for body in bodies}, anew


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", shared(range(1, 9), 2))
def test_topics_come_and_go_between_the_runs(
    spark: SparkSession, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    sys.stdout.write(f"seed {seed}\n")
    wanted: set[bytes] = set()
    with start_node(tmp_path_factory.mktemp("cmq"), ["commit_log.segment_bytes=262144"]) as node:
        world = World(node, seed)
        for _ in range(6):
            for _ in range(world.chance.randint(1, 5)):
                world.step()
            node.wait_until_dispatched("consume_queue")
            seen, anew = world.seen()
            source = world.chance.choice((node.address, str(node.store)))
            if not world.alive:
                continue  # who asks for a topic that is not there is told so
            ended = export(spark, [source], tmp_path / "out", topics=sorted(world.alive), fail_on_data_loss=False)
            assert ended.messages == len(seen - wanted)
            assert {gap.topic for gap in ended.gaps if gap.reason == ANEW} == anew
            wanted |= seen
            assert sorted(row.body for row in exported(spark, tmp_path / "out").select("body").collect()) == sorted(
                wanted
            )
