"""Goal: what a request costs the coordinator grows with what it changes, not with the groups, members and topics that exist;
and what clients can make it keep is bounded, with a reason in each refusal.

Method: the real service on real files, without sockets. Costs are counted: calls of functions (by the interpreter's
profiler) and bytes written (by the kernel, ``/proc/self/io``), never times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest

from commitmq.config import NodeConfig, from_mapping
from commitmq.control import ControlBlock
from commitmq.coordination import groups as pace
from commitmq.coordination.service import Service
from commitmq.errors import ProtocolError
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.group_config import GroupConfig, GroupTable
from commitmq.store.metadata.topic_config import TopicConfig, TopicTable
from small_disk import room

LONG_MS = 30 * 60_000


class Coordinator:
    """A service. Every request is a turn of its own, and takes 10 ms."""

    now_ms = 1_000_000
    """Of all services in one test; files are written at a pace by it."""

    def __init__(self, root: Path, config: NodeConfig | None = None) -> None:
        self.layout = StoreLayout(root)
        self.layout.run.mkdir(parents=True, exist_ok=True)
        self.control = ControlBlock(self.layout.control, create=True)
        self.config = config or NodeConfig()
        self.service = Service(self.layout, self.config, self.control, self.now_ms, room())

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """One turn with one request, as the worker does it."""
        Coordinator.now_ms += 10
        answer = self.service.handle({"op": op, **fields}, self.now_ms)
        self.service.tick(self.now_ms, expire_ms=self.now_ms)
        news = self.service.end_turn(self.now_ms)
        if news is not None:
            self.service.tell(self.now_ms)
        assert self.service.fault(answer.needs) is None
        said = answer.fields()
        self.service.forget_faults()
        self.service.next_ms()
        return said

    def refused(self, op: str, **fields: Any) -> str:
        with pytest.raises(ProtocolError) as caught:
            self.ask(op, **fields)
        return str(caught.value)

    def join(self, group: str, member: str = "m", topics: list[str] | None = None, **more: Any) -> dict[str, Any]:
        return self.ask(
            "group.join", group=group, member=member, topics=topics or ["t"], session_timeout_ms=LONG_MS, **more
        )

    def beat(self, group: str, joined: dict[str, Any]) -> None:
        owned = [list(one) for one in joined["assigned"]]
        self.ask("group.heartbeat", group=group, member="m", generation=joined["generation"], owned=owned)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "now_ms", Coordinator.now_ms)
    monkeypatch.setattr(pace, "_monotonic_ms", lambda: Coordinator.now_ms)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Coordinator]]:
    all_made: list[Coordinator] = []

    def make(name: str = "store", **sections: dict[str, Any]) -> Coordinator:
        all_made.append(Coordinator(tmp_path / name, from_mapping(sections)))
        return all_made[-1]

    yield make
    for one in all_made:
        one.service.close()
        one.control.close()


def calls(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls, of Python and of C."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def written_bytes(work: Callable[[], object]) -> int:
    """How many bytes this process hands to the kernel meanwhile."""

    def so_far() -> int:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["wchar"])

    before = so_far()
    work()
    return so_far() - before


def test_a_heartbeat_and_a_join_cost_the_same_among_thousands_of_groups(made: Callable[..., Coordinator]) -> None:
    one = made()
    one.ask("topic.create", topic="t", queues=4)
    names = (f"more{number}" for number in range(1_000))

    def measured(count: int) -> tuple[int, ...]:
        for number in range(len(list(one.service.groups.names_from(""))), count):
            one.join(f"g{number:05d}")
        joined = one.join("g00050")
        one.beat("g00050", joined)
        return (
            min(calls(lambda: one.beat("g00050", joined)) for _ in range(5)),
            min(calls(lambda: one.join(next(names))) for _ in range(5)),
            min(calls(lambda: one.ask("topic.create", topic=next(names), queues=1)) for _ in range(5)),
            min(written_bytes(lambda: one.join(next(names))) for _ in range(5)),
        )

    few, many = measured(100), measured(3_000)
    for cost_few, cost_many in zip(few, many, strict=True):
        assert cost_many <= 1.5 * cost_few + 200, (few, many)


def test_the_ten_thousandth_topic_is_not_dearer_than_the_first_hundred(made: Callable[..., Coordinator]) -> None:
    """Bytes written and functions called for 20 topics, when 100 and when 3,000 are there, snapshots left out."""
    one = made()
    costs = {}
    number = 0

    def create() -> None:
        nonlocal number
        number += 1
        one.ask("topic.create", topic=f"topic-{number:06d}", queues=4)

    for count in (100, 3_000):
        while number < count:
            create()
        costs[count] = (
            sorted(written_bytes(create) for _ in range(21))[10],
            sorted(calls(create) for _ in range(21))[10],
        )
    for few, many in zip(costs[100], costs[3_000], strict=True):
        assert many <= 2 * few, costs


def test_after_a_start_with_thousands_of_groups_and_topics_no_turn_encodes_all_of_them(tmp_path: Path) -> None:
    count = 2_000
    layout = StoreLayout(tmp_path)
    layout.config.mkdir()
    groups, topics = GroupTable(), TopicTable()
    for number in range(count):
        groups.put(GroupConfig(f"group-{number:06d}"))
        topics.put(TopicConfig(f"topic-{number:06d}", 4, 4))
    groups.persist(layout.config / "subscriptionGroup.json")
    topics.persist(layout.config / "topics.json")
    one = Coordinator(tmp_path)
    turns = []

    def turn() -> None:
        Coordinator.now_ms += 10
        one.service.tick(one.now_ms, expire_ms=one.now_ms)
        one.service.end_turn(one.now_ms)
        one.service.write_snapshots(one.now_ms)

    try:
        turns.append(calls(lambda: one.join("new")))
        turns.append(calls(lambda: one.ask("topic.create", topic="new", queues=1)))
        while (
            one.service.groups.next_write_ms() is not None or one.service.topics.storage.next_snapshot_ms() is not None
        ):
            turns.append(calls(turn))
            assert len(turns) < 100
        assert max(turns) < 40 * count, "one turn encoded everything"
        assert len(GroupTable.load(layout.config / "subscriptionGroup.json").groups) == count + 1
        assert len(TopicTable.load(layout.config / "topics.json").topics) == count + 1
    finally:
        one.service.close()
        one.control.close()


def test_a_large_group_answers_heartbeats_without_a_look_at_its_members(made: Callable[..., Coordinator]) -> None:
    one = made()
    one.ask("topic.create", topic="t", queues=4_000)

    def measured(count: int) -> int:
        for number in range(1, count):
            one.join("g", f"member{number:04d}")
        one.join("g")
        joined = one.join("g")
        joined["assigned"] = joined["assigned"][:4]
        one.beat("g", joined)
        return min(calls(lambda: one.beat("g", joined)) for _ in range(5))

    few, many = measured(20), measured(1_000)
    assert many <= 1.5 * few + 100, (few, many)


def test_joins_with_large_filters_write_little_and_are_kept_within_bounds(made: Callable[..., Coordinator]) -> None:
    """600 groups with SQL filters of 16 KB: they were written whole, twice, and parsed again, at every join."""
    one = made()
    one.ask("topic.create", topic="t", queues=1)
    large = "a = 1 OR " * 1_800 + "a = 2"

    def join_all() -> None:
        for number in range(600):
            one.join(f"g{number}", filter={"type": "SQL92", "expression": large[: 16_000 - number]})

    assert written_bytes(join_all) < 4 * 1024 * 1024
    assert len(one.service.subscriptions) == 0, "filters of this size get no bit maps"
    for number in range(600):
        one.join(f"g{number}", filter={"type": "SQL92", "expression": f"a = {number}" + " " * 4_000})
    limits = one.config.filter
    assert 0 < len(one.service.subscriptions) <= limits.max_subscriptions
    kept = {one.expression for of_topic in one.service.subscriptions.by_topic.values() for one in of_topic.values()}
    assert sum(map(len, kept)) <= limits.max_kept_bytes
    # As many groups as one likes may use one expression: it is kept once.
    before = one.service.subscriptions._kept_bytes
    for number in range(100):
        one.join(f"same{number}", filter={"type": "SQL92", "expression": "a = 0" + " " * 4_000})
    assert one.service.subscriptions._kept_bytes == before


def test_what_members_take_is_limited_and_each_refusal_names_its_setting(made: Callable[..., Coordinator]) -> None:
    one = made(
        groups={
            "max_topics_per_member": 50,
            "max_member_bytes": 30_000,
            "max_membership_bytes": 100_000,
            "max_members_per_group": 8,
            "max_groups": 12,
        }
    )
    one.ask("topic.create", topic="t", queues=100)
    one.ask("topic.create", topic="wide", queues=500)
    beside = one.join("beside")
    assert "groups.max_topics_per_member" in one.refused(
        "group.join", group="g", member="m", topics=[f"t{number}" for number in range(100_000)]
    )
    assert "groups.max_member_bytes" in one.refused("group.join", group="g", member="m", topics=["t", "wide"])
    claimed = [["nothing", number] for number in range(1_000)]
    assert "groups.max_member_bytes" in one.refused("group.join", group="g", member="m", topics=["t"], owned=claimed)
    assert "groups.max_member_bytes" in one.refused(
        "group.heartbeat", group="beside", member="m", generation=beside["generation"], owned=claimed
    )
    for number in range(8):
        one.join("full", f"m{number}", ["u"])
    assert "groups.max_members_per_group" in one.refused("group.join", group="full", member="m8", topics=["u"])
    reasons = set()
    for number in range(20):
        try:
            one.join(f"group{number}")
        except ProtocolError as error:
            reasons.add(str(error).rpartition("(")[2])
    assert reasons == {"groups.max_membership_bytes)", "groups.max_groups)"}
    one.beat("beside", beside)  # who is there is not disturbed
    # What goes makes room.
    before = one.service.groups._size_bytes
    assert before <= 100_000
    for name in [*one.service.groups._live]:
        if name != "beside":
            for member in [*one.service.groups._live[name].members]:
                one.ask("group.leave", group=name, member=member)
    assert one.service.groups._size_bytes < before / 2
    one.join("full", "late")


def test_members_and_groups_are_known_to_the_next_coordinator(made: Callable[..., Coordinator], tmp_path: Path) -> None:
    one = made()
    one.ask("topic.create", topic="t", queues=4)
    for number in range(50):
        one.join(f"g{number}")
        one.join(f"g{number}", "other")
        one.ask("group.leave", group=f"g{number}", member="other")
    for number in range(40, 50):
        one.ask("group.leave", group=f"g{number}", member="m")
    # It is killed: nothing is closed, and its last line is torn.
    path = one.layout.own / "group_members.log"
    path.write_bytes(path.read_bytes() + b'["g0","late",60')
    later = Service(one.layout, one.config, one.control, one.now_ms, room())
    awaited = {name: sorted(group.awaited) for name, group in later.groups._live.items()}
    assert awaited == {f"g{number}": ["m"] for number in range(40)}
    assert set(later.groups.names_from("")) >= {f"g{number}" for number in range(40)}
    later.close()
    kept = json_config.load(one.layout.config / "subscriptionGroup.json")
    assert kept is not None
    assert kept["subscriptionGroupTable"]["g39"]


def test_the_log_of_members_does_not_grow_with_what_came_and_went(made: Callable[..., Coordinator]) -> None:
    one = made()
    for number in range(6_000):
        one.join("g", f"m{number}")
        one.ask("group.leave", group="g", member=f"m{number}")
    assert (one.layout.own / "group_members.log").stat().st_size < 400_000
    assert len(one.service.groups._looks) < 13_000  # a look at each that is gone, for five seconds at most
    Coordinator.now_ms += 10_000
    one.join("g")
    assert len(one.service.groups._looks) <= 2


def test_lists_come_in_pages_that_leave_nothing_out(made: Callable[..., Coordinator]) -> None:
    one = made()
    for number in range(1_203):
        one.ask("topic.create", topic=f"t{number:04d}", queues=1)
    for number in range(7):
        one.join(f"g{number}", topics=["t0000", "t0001"])
        offsets = [[f"t{topic:04d}", 0, topic] for topic in range(300)]
        one.ask("offset.commit", group=f"h{number}", offsets=offsets)

    def pages(op: str, limit: int, **fields: Any) -> list[dict[str, Any]]:
        found, after = [], None
        while True:
            page = one.ask(op, limit=limit, after=after, **fields)
            found.append(page)
            after = page["next"]
            if after is None:
                return found

    def rows(page: dict[str, Any]) -> list[dict[str, Any]]:
        return list(orjson.loads(orjson.dumps(page["topics"])))

    for limit in (1, 7, 500, 100_000):
        if limit > 1:
            listed = pages("topic.list", limit)
            assert [row["name"] for page in listed for row in rows(page)] == one.service.topics.names()
            assert all(len(rows(page)) <= 500 for page in listed)
        positions = [tuple(row) for page in pages("group.positions", max(limit, 7)) for row in page["positions"]]
        assert len(positions) == len(set(positions)) == 7 * 300 + 7 * 2
        groups: dict[str, list[str]] = {}
        for page in pages("group.list", max(limit, 7)):
            for row in page["groups"]:
                groups.setdefault(row["name"], []).extend(row["topics"])
        assert {name: len(topics) for name, topics in groups.items()} == {
            **{f"g{number}": 0 for number in range(7)},
            **{f"h{number}": 300 for number in range(7)},
        }
        described = [page["group"] for page in pages("group.describe", limit, group="h3")]
        assert [row for part in described for row in part["offsets"]] == [(f"t{n:04d}", 0, n) for n in range(300)]
        described = [page["group"] for page in pages("group.describe", limit, group="g3")]
        (member,) = (row for part in described for row in part["members"])
        assert member["queues"] == [("t0000", 0), ("t0001", 0)]
    odd: tuple[Any, ...] = ("x", ["x"], ["members", 1], ["nothing", "t", 1], {})
    for wrong in odd:
        assert "INVALID_PARAMETER" in one.refused("group.describe", group="h3", after=wrong)
    # A page that was kept is not shown once the topic has changed.
    one.ask("topic.create", topic="t0000", queues=9, update=True)
    assert rows(one.ask("topic.list"))[0]["read_queues"] == 9
    one.ask("topic.create", topic="a-first", queues=1)
    assert rows(one.ask("topic.list"))[0]["name"] == "a-first"
