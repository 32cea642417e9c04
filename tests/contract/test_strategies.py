"""Goal: the members of a group get the queues of the strategy that they name; a conflict is refused, and harms nobody.

Method: a real node, consumers that join and close, and the coordinator killed by SIGKILL; expected shares by the pure rule.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from commitmq import Admin, Consumer, ProtocolError
from commitmq.semantics.allocation import MessageQueue, consistent_hash
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(
        tmp_path_factory.mktemp("strategies"),
        "network.broker_name=r1@node",
        "topics.default_queues=8",
        "groups.heartbeat_interval_ms=100",
    ) as made:
        with Admin(made.address) as admin:
            admin.topic_create("t", 8)
        yield made


def member(node: Node, group: str, name: str, **options: Any) -> Consumer:
    return Consumer("t", group=group, member=name, node=node.address, **options)


def has(consumer: Consumer, queues: list[int]) -> bool:
    consumer.poll(0.05)
    return [queue for _, queue in consumer.assignment] == queues


def test_queues_are_dealt_out(node: Node) -> None:
    with member(node, "circle", "a", strategy="AVG_BY_CIRCLE") as first, member(node, "circle", "b") as second:
        eventually(lambda: has(first, [0, 2, 4, 6]) and has(second, [1, 3, 5, 7]), "every second queue each")
        with pytest.raises(ProtocolError, match="AVG_BY_CIRCLE, not AVG") as refused:
            member(node, "circle", "c", strategy="AVG")
        assert refused.value.code == "NO_PERMISSION"
        assert has(first, [0, 2, 4, 6])
    with member(node, "circle", "c", strategy="AVG") as alone:
        eventually(lambda: has(alone, [*range(8)]), "an empty group takes another strategy")


def test_the_first_that_names_one_sets_it(node: Node) -> None:
    with member(node, "later", "a") as first:
        eventually(lambda: has(first, [*range(8)]), "all queues")
        with member(node, "later", "b", strategy="AVG_BY_CIRCLE") as second:
            eventually(lambda: has(first, [0, 2, 4, 6]) and has(second, [1, 3, 5, 7]), "every second queue each")


def test_consistent_hash_over_a_restart_of_the_coordinator(node: Node) -> None:
    names = ["a", "b", "c"]
    queues = [MessageQueue("t", "r1@node", queue) for queue in range(8)]
    expected = {name: [one.queue_id for one in consistent_hash(name, queues, names)] for name in names}
    consumers = {name: member(node, "hash", name, strategy="CONSISTENT_HASH") for name in names}
    try:
        eventually(lambda: all(has(consumers[name], expected[name]) for name in names), "the shares of the rule")
        os.kill(node.pids()["coordinator"], signal.SIGKILL)
        eventually(lambda: all(has(consumers[name], expected[name]) for name in names), "the same shares")
        consumers.pop("b").close()
        rest = {name: [one.queue_id for one in consistent_hash(name, queues, ["a", "c"])] for name in ("a", "c")}
        eventually(lambda: all(has(consumers[name], rest[name]) for name in rest), "the shares of two")
    finally:
        for consumer in consumers.values():
            consumer.close()


def test_a_machine_room(node: Node) -> None:
    with member(node, "room", "a", strategy="MACHINE_ROOM:r1,r2") as consumer:
        eventually(lambda: has(consumer, [*range(8)]), "the queues of its room")
    with member(node, "elsewhere", "a", strategy="MACHINE_ROOM:r3") as consumer:
        assert has(consumer, [])


def test_by_configuration(node: Node) -> None:
    names = [f"member-{number}-" + "x" * 90 for number in range(4)]
    strategy = "CONFIG:" + ";".join(f"{name}={number},{number + 4}" for number, name in enumerate(names))
    with (
        member(node, "configured", names[1], strategy=strategy) as first,
        member(node, "configured", names[3]) as second,
    ):
        eventually(lambda: has(first, [1, 5]) and has(second, [3, 7]), "the queues of the text")
        first.close()
        assert has(second, [3, 7])
    with pytest.raises(ProtocolError, match="strategy must be a string of 1 to 8192 characters") as refused:
        member(node, "configured", "a", strategy="CONFIG:a=" + "1," * 5_000 + "1")
    assert refused.value.code == "INVALID_PARAMETER"


def test_an_unknown_strategy_is_refused(node: Node) -> None:
    with pytest.raises(ProtocolError, match="known are AVG") as refused:
        member(node, "wrong", "a", strategy="BEST")
    assert refused.value.code == "INVALID_PARAMETER"
