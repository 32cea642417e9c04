"""Goal: under each strategy every queue has one holder at most, who is the one of RocketMQ's rule once the group is settled.

Method: a membership whose members come, go, die and give back at random (seeded), compared with the pure rule for the same
lists; conflicting strategies; a coordinator that is started again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from commitmq.coordination.groups import use_strategy
from commitmq.coordination.membership import AllocationTable, Membership, Queue, View
from commitmq.errors import ProtocolError
from commitmq.semantics import allocation
from commitmq.semantics.allocation import MessageQueue, Strategy

CONFIGURED = {"m1": (0, 2), "m3": (5, 15), "x=y": (1,)}
STRATEGIES: dict[str, Strategy] = {
    "AVG": allocation.averagely,
    "AVG_BY_CIRCLE": allocation.averagely_by_circle,
    "CONSISTENT_HASH": allocation.consistent_hash,
    "MACHINE_ROOM:r, s": allocation.machine_room(["r", "s"]),
    "MACHINE_ROOM:t": allocation.machine_room(["t"]),
    "CONFIG: m1=0,2;m3=5,15 ;x=y=1": lambda me, queues, _: [
        one for one in queues if one.queue_id in CONFIGURED.get(me, ())
    ],
}
COUNTS = {"a": 7, "b": 1, "c": 16}
BROKER = "r@node"


def group_with(strategy: str | None) -> Membership:
    group = Membership("g", queues_of)
    use_strategy(group, None if strategy is None else AllocationTable(strategy, BROKER))
    return group


def queues_of(topic: str) -> Sequence[int]:
    return range(COUNTS.get(topic, 0))


def expected(strategy: str, group: Membership) -> dict[Queue, str]:
    """By the pure rule."""
    found = {}
    for topic in COUNTS:
        members = sorted(name for name, member in group.members.items() if topic in member.topics)
        queues = [MessageQueue(topic, BROKER, queue) for queue in queues_of(topic)]
        for name in members:
            for one in STRATEGIES[strategy](name, queues, members):
                found[topic, one.queue_id] = name
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(6))
def test_members_that_come_and_go_settle_by_the_rule(strategy: str, seed: int) -> None:
    chance = random.Random(seed)
    group = group_with(strategy)
    views: dict[str, View] = {}
    now = 0
    for _ in range(120):
        now += 1
        name = f"m{chance.randrange(8)}"
        step = chance.random()
        if name not in group.members:
            topics = chance.sample(sorted(COUNTS), chance.randint(1, 3))
            views[name] = group.join(name, topics, [], 1_000, now)
        elif step < 0.15:
            group.leave(name)
            del views[name]
        else:
            # A member may keep what it shall give back for a while.
            owned = [queue for queue in views[name].assigned if chance.random() < 0.9]
            views[name] = group.heartbeat(name, views[name].generation, owned, now)
        for queue, holder in group.holders.items():
            assert queue in group.members[holder].held
    for _ in range(4):
        for name, view in list(views.items()):
            views[name] = group.heartbeat(name, view.generation, view.assigned, now)
    assert group.holders == expected(strategy, group) == group.target
    assert all(view.settled for view in views.values())
    assert group.settled


def test_the_average_strategy_by_name_is_the_one_without_a_name() -> None:
    named, plain = group_with("AVG"), group_with(None)
    for group in (named, plain):
        for name in ("x", "y", "z"):
            group.join(name, ["a", "c"], [], 1_000, 0)
    assert named.target == plain.target
    assert named.table is None  # it is arithmetic on the own share
    with pytest.raises(ProtocolError, match="AVG, not CONSISTENT_HASH"):
        use_strategy(named, AllocationTable("CONSISTENT_HASH", BROKER))


def test_the_first_name_holds() -> None:
    group = group_with(None)
    group.join("x", ["a"], [], 1_000, 0)
    use_strategy(group, AllocationTable("AVG_BY_CIRCLE", BROKER))
    group.join("y", ["a"], [], 1_000, 0)
    assert [queue for queue, name in group.target.items() if name == "x"] == [("a", one) for one in (0, 2, 4, 6)]
    use_strategy(group, AllocationTable("AVG_BY_CIRCLE", BROKER))
    use_strategy(group, None)
    with pytest.raises(ProtocolError, match="AVG_BY_CIRCLE, not AVG") as refused:
        use_strategy(group, AllocationTable("AVG", BROKER))
    assert refused.value.code == "NO_PERMISSION"


@pytest.mark.parametrize("name", ["avg", "", "MACHINE_ROOM", "CONFIG"])
def test_an_unknown_strategy_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match="known are AVG,") as refused:
        AllocationTable(name, BROKER)
    assert refused.value.code == "INVALID_PARAMETER"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be a member and its queues"),
        ("m", "must be a member and its queues"),
        ("=1", "must be a member and its queues"),
        ("m=", "must be a member and its queues"),
        ("m=1;", "must be a member and its queues"),
        ("m=-1", "must be a member and its queues"),
        ("m=1;m=2", "'m' is named twice"),
        ("m=1,2;n=2,3", "queue 2 is given to 'm' and to 'n'"),
    ],
)
def test_a_wrong_configuration_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason) as refused:
        AllocationTable(f"CONFIG:{text}", BROKER)
    assert refused.value.code == "INVALID_PARAMETER"


def test_a_topic_that_grows_is_shared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_with("CONSISTENT_HASH")
    view = group.join("x", ["b"], [], 1_000, 0)
    assert view.assigned == [("b", 0)]
    monkeypatch.setitem(COUNTS, "b", 5)
    group.rebalance()
    assert group.heartbeat("x", view.generation, view.assigned, 1).assigned == [("b", queue) for queue in range(5)]


def test_members_that_come_back_keep_their_queues() -> None:
    """The coordinator was started again: nobody loses a queue that the strategy leaves to it."""
    before = group_with("CONSISTENT_HASH")
    views = {name: before.join(name, ["c"], [], 1_000, 0) for name in ("x", "y")}
    for _ in range(3):
        views = {name: before.heartbeat(name, view.generation, view.assigned, 1) for name, view in views.items()}
    after = Membership("g", queues_of, generation=100)
    after.wait_for(dict.fromkeys(views, 1_000), 0)
    for name, view in views.items():
        use_strategy(after, AllocationTable("CONSISTENT_HASH", BROKER))
        after.join(name, ["c"], view.assigned, 1_000, 1, view.generation)
    assert after.holders == before.holders == after.target
