"""Goal: no queue is ever consumed by two members of a group, and once things are quiet every queue is consumed.
Method: tables for the rules; a random machine of consumers whose requests and answers are delayed, lost and crossed,
who die and come, with the coordinator restarting under them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from commitmq.coordination.membership import Membership, Queue, View, share
from commitmq.errors import ProtocolError

TIMEOUT_MS = 6_000


def _group(**topics: int) -> Membership:
    return Membership("g", lambda topic: range(topics.get(topic, 0)))


def _queues(view: View) -> list[int]:
    return [queue for _, queue in view.assigned]


@pytest.mark.parametrize(
    ("queues", "members", "shares"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (4, 3, [[0, 1], [2], [3]]),
        (2, 3, [[0], [1], []]),
        (0, 2, [[], []]),
    ],
)
def test_average_allocation(queues: int, members: int, shares: list[list[int]]) -> None:
    assert [list(share(range(queues), members, number)) for number in range(members)] == shares
    group = _group(t=queues)
    for number in range(members):
        group.join(f"m{number}", ["t"], [], TIMEOUT_MS, 0)
    names = sorted(group.members)
    assert [[queue for (_, queue), owner in group.target.items() if owner == name] for name in names] == shares
    # Who should have a queue is also found the other way round, and from the queue alone.
    assert {queue: group._owner(queue) for queue in group.target} == group.target


def test_the_first_member_gets_everything_at_once() -> None:
    view = _group(t=4).join("a", ["t"], [], TIMEOUT_MS, 0)
    assert _queues(view) == [0, 1, 2, 3]
    assert view.settled


def test_a_queue_moves_only_after_its_owner_gave_it_back() -> None:
    group = _group(t=4)
    a = group.join("a", ["t"], [], TIMEOUT_MS, 0)
    b = group.join("b", ["t"], [], TIMEOUT_MS, 0)
    assert (_queues(b), b.settled) == ([], False)
    a = group.heartbeat("a", a.generation, a.assigned, 100)
    assert (_queues(a), [queue for _, queue in a.revoke]) == ([0, 1], [2, 3])
    assert _queues(group.heartbeat("b", b.generation, [], 150)) == []
    group.check_owner("a", ("t", 3))  # it may still commit what it was working on
    a = group.heartbeat("a", a.generation, a.assigned, 200)
    assert a.settled
    b = group.heartbeat("b", b.generation, [], 250)
    assert (_queues(b), b.settled) == ([2, 3], True)
    assert group.settled
    with pytest.raises(ProtocolError, match="FENCED"):
        group.check_owner("a", ("t", 3))


def test_an_older_heartbeat_does_not_give_a_queue_back() -> None:
    group = _group(t=2)
    a = group.join("a", ["t"], [], TIMEOUT_MS, 0)
    group.join("b", ["t"], [], TIMEOUT_MS, 0)
    # Sent before the join's answer was read, so it lists nothing; the answer that gives both queues is still under way.
    group.heartbeat("a", a.generation - 1, [], 10)
    b = group.heartbeat("b", group.generation, [], 20)
    assert _queues(b) == []


def test_a_join_sent_twice_does_not_give_back_what_the_first_answer_brings() -> None:
    group = _group(t=1)
    group.join("b", ["t"], [], TIMEOUT_MS, 0)
    group.join("a", ["t"], [], TIMEOUT_MS, 0)
    group.join("b", ["t"], [], TIMEOUT_MS, 0)
    assert _queues(group.heartbeat("a", group.generation, [], 1)) == []
    group.heartbeat("b", group.generation, [], 2)  # now it has read that it is to consume nothing
    assert _queues(group.heartbeat("a", group.generation, [], 3)) == [0]


def test_a_queue_asked_back_and_assigned_again_is_not_given_back_by_who_read_the_first_answer() -> None:
    topics = {"t": 1}
    group = Membership("g", lambda topic: range(topics.get(topic, 0)))
    first = group.join("b", ["t"], [], TIMEOUT_MS, 0)
    topics["t"] = 0
    group.rebalance()
    asked = group.heartbeat("b", first.generation, first.assigned, 1)
    assert asked.revoke == [("t", 0)]
    topics["t"] = 1
    group.rebalance()
    again = group.heartbeat("b", first.generation, first.assigned, 2)  # was sent before ``asked`` was read
    assert again.assigned == [("t", 0)]
    group.join("a", ["t"], [], TIMEOUT_MS, 3)
    group.heartbeat("b", asked.generation, [], 4)  # was sent before ``again`` was read, which is still under way
    assert _queues(group.heartbeat("a", group.generation, [], 5)) == []
    group.heartbeat("b", again.generation, [], 6)
    assert _queues(group.heartbeat("a", group.generation, [], 7)) == [0]


def test_leave_and_expiry_free_queues_at_once() -> None:
    group = _group(t=4)
    group.join("a", ["t"], [], TIMEOUT_MS, 0)
    b = group.join("b", ["t"], [], TIMEOUT_MS, 0)
    group.leave("a")
    b = group.heartbeat("b", b.generation, [], 10)
    assert _queues(b) == [0, 1, 2, 3]
    group.join("c", ["t"], [], TIMEOUT_MS, 5_000)
    assert group.due_ms("b") == 10 + TIMEOUT_MS
    assert group.expire(10 + TIMEOUT_MS - 1) == []
    assert group.expire(10 + TIMEOUT_MS) == ["b"]
    assert _queues(group.heartbeat("c", group.generation, [], 6_100)) == [0, 1, 2, 3]
    with pytest.raises(ProtocolError, match="UNKNOWN_MEMBER"):
        group.heartbeat("b", b.generation, b.assigned, 6_200)
    group.leave("b")


def test_members_with_different_topics_share_each_topic() -> None:
    group = _group(t=2, u=2)
    a = group.join("a", ["t", "u"], [], TIMEOUT_MS, 0)
    b = group.join("b", ["u"], [], TIMEOUT_MS, 0)
    a = group.heartbeat("a", a.generation, a.assigned, 1)
    a = group.heartbeat("a", a.generation, a.assigned, 2)
    b = group.heartbeat("b", b.generation, [], 3)
    assert a.assigned == [("t", 0), ("t", 1), ("u", 0)]
    assert b.assigned == [("u", 1)]


def test_another_subscription_shares_anew() -> None:
    group = _group(t=1, u=1)
    first = group.join("a", ["t"], [], TIMEOUT_MS, 0)
    view = group.join("a", ["u"], [("t", 0)], TIMEOUT_MS, 1, first.generation)
    assert (view.assigned, view.revoke) == ([("u", 0)], [("t", 0)])


def test_new_and_deleted_topics_are_picked_up() -> None:
    topics = {"t": 1}
    group = Membership("g", lambda topic: range(topics.get(topic, 0)))
    view = group.join("a", ["t", "u"], [], TIMEOUT_MS, 0)
    topics["u"] = 2
    group.rebalance()
    view = group.heartbeat("a", view.generation, view.assigned, 1)
    assert view.assigned == [("t", 0), ("u", 0), ("u", 1)]
    del topics["t"]
    group.rebalance()
    view = group.heartbeat("a", view.generation, view.assigned, 2)
    assert (view.assigned, view.revoke) == ([("u", 0), ("u", 1)], [("t", 0)])
    group.heartbeat("a", view.generation, view.assigned, 3)
    assert ("t", 0) not in group.holders


def test_after_a_restart_owners_keep_their_queues_and_newcomers_wait() -> None:
    group = _group(t=4)
    group.wait_for({"a": TIMEOUT_MS, "b": TIMEOUT_MS}, 0)
    newcomer = group.join("0", ["t"], [], TIMEOUT_MS, 0)
    assert _queues(newcomer) == []
    b = group.join("b", ["t"], [("t", 2), ("t", 3)], TIMEOUT_MS, 10)
    assert set(_queues(b)) <= {2, 3}
    assert _queues(group.heartbeat("0", newcomer.generation, [], 20)) == []
    group.expire(TIMEOUT_MS)  # a never comes back
    group.heartbeat("b", group.generation, b.assigned, TIMEOUT_MS)
    view = group.join("0", ["t"], [], TIMEOUT_MS, TIMEOUT_MS)
    assert _queues(view) == [0, 1]


def test_a_claim_of_what_another_holds_is_refused() -> None:
    group = _group(t=2)
    a = group.join("a", ["t"], [], TIMEOUT_MS, 0)
    b = group.join("b", ["t"], [("t", 0)], TIMEOUT_MS, 0)
    assert (b.assigned, b.revoke) == ([], [("t", 0)])
    group.check_owner("a", a.assigned[0])
    with pytest.raises(ProtocolError, match="FENCED"):
        group.check_owner("b", ("t", 0))
    with pytest.raises(ProtocolError, match="FENCED"):
        group.check_owner(None, ("t", 0))
    with pytest.raises(ProtocolError, match="UNKNOWN_MEMBER"):
        group.check_owner("nobody", ("t", 0))


def test_who_comes_back_after_its_session_begins_anew() -> None:
    """Its queue may have been another's, or reset to the offset that it knows: neither can be seen in the offset."""
    group = _group(t=1)
    first = group.join("a", ["t"], [], TIMEOUT_MS, 0)
    assert group.heartbeat("a", first.generation, first.assigned, 1).kept
    again = group.join("a", ["t"], first.assigned, TIMEOUT_MS, 2, first.generation)
    assert again.kept
    group.expire(2 + TIMEOUT_MS)
    for _ in range(2):  # the answer to the first was lost
        back = group.join("a", ["t"], again.assigned, TIMEOUT_MS, 3 + TIMEOUT_MS, again.generation)
        assert (back.kept, back.assigned) == (False, [("t", 0)])
        with pytest.raises(ProtocolError, match="FENCED"):
            group.check_owner("a", ("t", 0), again.generation)
    group.check_owner("a", ("t", 0), back.generation)
    assert group.join("a", ["t"], back.assigned, TIMEOUT_MS, 3 + TIMEOUT_MS, back.generation).kept


def test_who_is_awaited_after_a_restart_keeps_what_it_has() -> None:
    group = _group(t=1)
    group.wait_for({"a": TIMEOUT_MS}, 0)
    view = group.join("a", ["t"], [("t", 0)], TIMEOUT_MS, 1, 7)
    assert (view.kept, view.assigned) == (True, [("t", 0)])


def test_the_number_of_members_is_limited() -> None:
    group = Membership("g", lambda _: range(1), max_members=1)
    group.join("a", ["t"], [], TIMEOUT_MS, 0)
    group.join("a", ["t"], [], TIMEOUT_MS, 0)
    with pytest.raises(ProtocolError, match="LIMIT_EXCEEDED"):
        group.join("b", ["t"], [], TIMEOUT_MS, 0)


@dataclass
class Consumer:
    """A client as PROTOCOL.md asks for: consumes what the newest answer assigns, and stops when it hears nothing."""

    name: str
    topics: frozenset[str]
    alive: bool = True
    generation: int = 0
    owned: frozenset[Queue] = frozenset()
    joined: bool = False
    heard_ms: int = 0  # when the request was sent whose answer it read last
    requests: list[tuple[str, int, frozenset[Queue], int]] = field(default_factory=list)
    answers: list[tuple[View | None, int]] = field(default_factory=list)

    def consuming(self, now_ms: int) -> frozenset[Queue]:
        """Its session counts from when it asked, so a consumer stops before the coordinator gives it up."""
        return self.owned if self.alive and now_ms < self.heard_ms + TIMEOUT_MS else frozenset()


class CrossedGroup(RuleBasedStateMachine):
    """Requests and answers of each consumer stay in order, but take any time, and may be lost with their connection."""

    @initialize(queues=st.integers(1, 5))
    def start(self, queues: int) -> None:
        self.now_ms = 1_000
        self.topics = {"t": queues, "u": 2}
        self.consumers: dict[str, Consumer] = {}
        self.starts = 0
        self.begin({})
        for name in "ab":
            self.arrive_as(name, "t")

    def begin(self, awaited: dict[str, int]) -> None:
        self.starts += 1
        self.group = Membership("g", lambda topic: range(self.topics.get(topic, 0)), generation=self.starts * 1_000_000)
        self.group.wait_for(awaited, self.now_ms)

    @rule(name=st.sampled_from("abc"), topics=st.sampled_from(["t", "tu", "u"]))
    def arrive(self, name: str, topics: str) -> None:
        self.arrive_as(name, topics)

    def arrive_as(self, name: str, topics: str) -> None:
        if name not in self.consumers or not self.consumers[name].alive:
            # A dead consumer's successor has a name of its own, as clients make them.
            fresh = f"{name}{len(self.consumers)}"
            old = self.consumers.pop(name, None)
            if old is not None:
                self.consumers[old.name + "-dead"] = old
            self.consumers[name] = Consumer(fresh, frozenset(topics))

    @precondition(lambda self: any(one.alive for one in self.consumers.values()))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        self._send(self._pick(data))

    def _send(self, one: Consumer) -> None:
        if self.now_ms >= one.heard_ms + TIMEOUT_MS:
            one.owned, one.joined = frozenset(), False  # it stopped: its session may be over
        one.requests.append(("heartbeat" if one.joined else "join", one.generation, one.owned, self.now_ms))

    @precondition(lambda self: any(one.alive for one in self.consumers.values()))
    @rule(data=st.data(), times=st.integers(1, 3))
    def talk(self, data: st.DataObject, times: int) -> None:
        """Whole rounds: everything under way arrives, and one more exchange behind it."""
        one = self._pick(data)
        for _ in range(times):
            self._send(one)
            while one.requests:
                self._receive(one)
            while one.answers:
                self._read(one)

    @precondition(lambda self: any(one.requests for one in self.consumers.values()))
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        self._receive(data.draw(st.sampled_from([one for one in self.consumers.values() if one.requests])))

    def _receive(self, one: Consumer) -> None:
        kind, generation, owned, sent_ms = one.requests.pop(0)
        view: View | None
        try:
            if kind == "join":
                view = self.group.join(one.name, one.topics, owned, TIMEOUT_MS, self.now_ms, generation)
            else:
                view = self.group.heartbeat(one.name, generation, owned, self.now_ms)
        except ProtocolError as error:
            if error.code != "UNKNOWN_MEMBER":
                raise
            view = None
        one.answers.append((view, sent_ms))

    @precondition(lambda self: any(one.answers and one.alive for one in self.consumers.values()))
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self._read(data.draw(st.sampled_from([one for one in self.consumers.values() if one.answers and one.alive])))

    def _read(self, one: Consumer) -> None:
        view, sent_ms = one.answers.pop(0)
        if view is None:
            one.joined = False
            return
        if self.now_ms >= sent_ms + TIMEOUT_MS:
            return  # too old to rely on
        one.joined = True
        one.generation = max(one.generation, view.generation)
        one.heard_ms = max(one.heard_ms, sent_ms)
        one.owned = frozenset(view.assigned)

    @precondition(lambda self: any(one.alive for one in self.consumers.values()))
    @rule(data=st.data())
    def lose_connection(self, data: st.DataObject) -> None:
        one = self._pick(data)
        one.requests.clear()
        one.answers.clear()

    @precondition(lambda self: any(one.alive for one in self.consumers.values()))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        one = self._pick(data)
        one.alive = False
        one.answers.clear()

    @rule(delta_ms=st.sampled_from([10, 100, 500, 3_000]))
    def time_passes(self, delta_ms: int) -> None:
        self.now_ms += delta_ms
        if not any(one.requests for one in self.consumers.values()):
            self.group.expire(self.now_ms)

    @rule(queues=st.integers(0, 5))
    def topic_changes(self, queues: int) -> None:
        self.topics["t"] = queues
        self.group.rebalance()

    @rule()
    def restart(self) -> None:
        awaited = {name: one.session_timeout_ms for name, one in self.group.awaited.items()}
        awaited |= {name: one.session_timeout_ms for name, one in self.group.members.items()}
        for one in self.consumers.values():
            one.requests.clear()
            one.answers.clear()
        self.begin(awaited)

    @invariant()
    def no_queue_has_two_consumers(self) -> None:
        owners: dict[Queue, str] = {}
        for one in getattr(self, "consumers", {}).values():
            for queue in one.consuming(self.now_ms):
                assert queue not in owners, f"{queue} is consumed by {owners[queue]} and {one.name}"
                owners[queue] = one.name

    def teardown(self) -> None:
        """Quiet time: everyone alive talks, the dead time out, and then every queue has exactly its target."""
        if not hasattr(self, "consumers"):
            return
        alive = [one for one in self.consumers.values() if one.alive]
        for one in self.consumers.values():
            one.requests.clear()
            one.answers.clear()
        for _ in range(TIMEOUT_MS // 1_000 + 4):
            self.now_ms += 1_000
            for one in alive:
                self._round(one)
                self.no_queue_has_two_consumers()
            self.group.expire(self.now_ms)
        assert self.group.settled
        wanted = {(topic, queue) for one in alive for topic in one.topics for queue in range(self.topics[topic])}
        consumed = [queue for one in alive for queue in one.consuming(self.now_ms)]
        assert sorted(consumed) == sorted(wanted)

    def _round(self, one: Consumer) -> None:
        if self.now_ms >= one.heard_ms + TIMEOUT_MS:
            one.owned, one.joined = frozenset(), False
        try:
            if not one.joined:
                view = self.group.join(one.name, one.topics, one.owned, TIMEOUT_MS, self.now_ms, one.generation)
            else:
                view = self.group.heartbeat(one.name, one.generation, one.owned, self.now_ms)
        except ProtocolError:
            one.joined = False
            return
        one.joined, one.generation, one.heard_ms, one.owned = (
            True,
            view.generation,
            self.now_ms,
            frozenset(view.assigned),
        )

    def _pick(self, data: st.DataObject) -> Consumer:
        return data.draw(st.sampled_from([one for one in self.consumers.values() if one.alive]))


TestCrossedGroup = CrossedGroup.TestCase
TestCrossedGroup.settings = settings(max_examples=600, stateful_step_count=40, deadline=None)
