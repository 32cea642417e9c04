"""The state of ordered receives: which messages of a queue a group has, and until when the queue is blocked (remoting
5.7).

Owns ``config/consumerOrderInfo.json``, RocketMQ's file, and the journal beside it
(:mod:`commitmq.store.metadata.journal`). Both are read at the start. Changes are in the journal before an answer
leaves that depends on them, so a death changes nothing, and they cost what they are, however many queues have a state.
The file follows at intervals and at an orderly stop: RocketMQ continues with what it finds. The group's offset is its
committed one.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from commitmq.config import PopConfig
from commitmq.coordination.groups import Pace
from commitmq.errors import InvalidMessageError, ProtocolError, StoreError
from commitmq.files.disk import set_aside
from commitmq.files.disk_space import DiskRoom
from commitmq.log import Log
from commitmq.semantics.pop import FORGET_AFTER_MS, OrderState, file_content
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import journal, json_config
from commitmq.store.metadata.journal import OrderChange, OrdersJournal, States, TopicSeen
from commitmq.workers.pop.points import now_ms
from commitmq.workers.runtime.topic_view import TopicViews

_FILE: Final = "consumerOrderInfo.json"
_JOURNAL: Final = "orders.journal"
_SPARE: Final = 1_024
_FORGET_MS: Final = 60_000
_MAX_JOURNAL_BYTES: Final = 8 * 1024 * 1024  # a start reads the whole journal


class OrderKey(NamedTuple):
    """A queue that a group receives in order."""

    topic: str
    group: str
    queue: int


@dataclass(frozen=True, slots=True)
class _States:
    """The states of one topic and group by queue, as the file has them."""

    by_queue: dict[int, OrderState]

    def to_json(self) -> dict[int, Any]:
        return {queue: state.to_json() for queue, state in self.by_queue.items()}


class Orders:
    """The states of ordered receives. ``limits``: how many queues have one, and how often the file is written."""

    def __init__(self, layout: StoreLayout, log: Log, room: DiskRoom, limits: PopConfig) -> None:
        self._layout = layout
        self._path = journal.snapshot_path(layout)
        self._journal_path = journal.journal_path(layout)
        self._log, self._room = log, room
        self._most, self._most_ms = limits.max_ordered_queues, limits.max_invisible_ms
        self._table: dict[tuple[str, str], _States] = {}
        self._texts = json_config.MemberTexts(1)
        self._count = 0
        self._ends: list[tuple[int, OrderKey]] = []
        """When blocks end; some were replaced since."""
        self._changed: dict[OrderKey, None] = {}
        """What :meth:`store` has to store."""
        self._touched: set[tuple[str, str]] = set()
        """The members of the file that changed since it was written."""
        self._incarnations: dict[str, int] = {}
        """Of which topics the states are, as far as that is known; :attr:`_seen` names those that the journal lacks."""
        self._seen: set[str] = set()
        self._journal: OrdersJournal | None = None
        self._base = json_config.name_of(b"")
        self._pace = Pace(limits.persist_interval_ms)
        self._is_behind = False  # the file lacks what the journal has
        self._forget_at_ms = 0
        self._shifts: dict[OrderKey, int] = {}
        """By how much the clock was set forward since a state was made, or less than nothing: its times are of that clock."""

    def __len__(self) -> int:
        return self._count

    def load(self) -> None:
        """Read both files, at a start or instead of what is in memory. A damaged file is set aside: without it messages may
        come again early, and none is lost.
        """
        if self._journal is not None:
            self._journal.close()
        self._journal, self._base, self._is_behind = None, json_config.name_of(b""), False
        self._changed.clear()
        self._touched.clear()
        self._seen.clear()
        self._shifts.clear()
        self._incarnations = {}
        table: States = {}
        try:
            table, self._base = journal.load_snapshot(self._layout)
        except (StoreError, InvalidMessageError) as error:
            self._set_aside(self._path, error)
        has_changes = self._load_journal(table)
        self._table = {names: _States(states) for names, states in table.items() if states}
        self._count = sum(len(one.by_queue) for one in self._table.values())
        self._doubt_times()
        self._find_ends()
        if has_changes:
            # The journal's last record may have been read from the page cache of a machine whose disk never got it, and no
            # durable record may be appended behind such a record.
            assert self._journal is not None
            self._journal.failed = self._is_behind = True
            with contextlib.suppress(StoreError):  # the next store tries again
                self._write_snapshot()

    def _load_journal(self, table: States) -> bool:
        """Lay the journal over ``table``; whether the file lacks something of it."""
        try:
            found = OrdersJournal.open(self._journal_path)
        except StoreError as error:
            self._set_aside(self._journal_path, error)
            return False
        if found is None:
            return False
        self._journal, content = found
        if content.torn_copy is not None:
            self._log.warning(
                "torn tail of the orders journal cut", bytes=content.torn_bytes, copy=str(content.torn_copy)
            )
        if content.since(self._base) is None:
            sentence = (
                "consumerOrderInfo.json was not written by this node last: it counts, with the journal's newer states"
            )
            self._log.warning(sentence, changes=len(content.changes))
        journal.replay(table, content, self._base)
        self._incarnations = journal.incarnations(content, self._base)
        return bool(content.changes) or content.base != self._base

    def _set_aside(self, path: Path, error: Exception) -> None:
        """Give the damaged file another name."""
        aside = set_aside(path)
        self._log.error("the state of ordered receives is damaged", error=str(error), kept_as=str(aside))

    def _doubt_times(self) -> None:
        """States of a time to come, or that block their queues for longer than a request may ask for, are of a clock
        that was ahead. They continue as if their messages had been delivered just now.
        """
        now = now_ms()
        for key, state in self._all():
            then = max(state.pop_time, state.free_at(0) - self._most_ms)
            if then > now:
                self._shifts[key] = now - then

    def shift(self, jump_ms: int) -> None:
        """The clock was set forward by so much: queues are blocked for as long from now on as they were."""
        for key, _ in self._all():
            self._shifts[key] = self._shifts.get(key, 0) + jump_ms
        self._find_ends()

    def time_of(self, key: OrderKey) -> int:
        """The time now by the clock of the state of ``key``; what it says of times is to be compared with this."""
        return now_ms() - self._shifts.get(key, 0)

    def _end(self, key: OrderKey, state: OrderState) -> int:
        return state.free_at(0) + self._shifts.get(key, 0)

    def _find_ends(self) -> None:
        self._ends = [(self._end(key, state), key) for key, state in self._all() if not state.is_done()]
        heapq.heapify(self._ends)

    def _all(self) -> Iterator[tuple[OrderKey, OrderState]]:
        for (topic, group), states in self._table.items():
            for queue, state in states.by_queue.items():
                yield OrderKey(topic, group, queue), state

    def get(self, key: OrderKey) -> OrderState | None:
        """The last receive of this queue by this group."""
        states = self._table.get((key.topic, key.group))
        return None if states is None else states.by_queue.get(key.queue)

    def put(self, key: OrderKey, state: OrderState | None) -> None:
        """Its new state; None for no state. Stored by :meth:`store`."""
        names = key.topic, key.group
        states = self._table.get(names)
        if states is None:
            states = self._table[names] = _States({})
        by_queue = states.by_queue
        self._count -= len(by_queue)
        before = by_queue.pop(key.queue, None)
        if before is None or state is None or state.pop_time != before.pop_time:
            self._shifts.pop(key, None)  # it was made now
        if state is not None:
            by_queue[key.queue] = state
            heapq.heappush(self._ends, (self._end(key, state), key))  # at once, when all of it is acked
        self._count += len(by_queue)
        if not by_queue:
            del self._table[names]
        self._changed[key] = None
        self._touched.add(names)
        if len(self._ends) > 2 * self._count + _SPARE:
            self._find_ends()

    def see(self, topic: str, incarnation: int) -> None:
        """The topic of this name is the one with ``incarnation`` (0: of RocketMQ): drop all states of an earlier one."""
        known = self._incarnations.get(topic)
        if known == incarnation or not incarnation:
            return
        if known is not None:
            for key in [key for key, _ in self._all() if key.topic == topic]:
                self.put(key, None)
        self._incarnations[topic] = incarnation
        self._seen.add(topic)

    def drop(self, key: OrderKey) -> None:
        """An operator set the offset back, or the topic was deleted: nothing of the queue is out any more."""
        if self.get(key) is not None:
            self.put(key, None)

    def check_room(self, key: OrderKey, now_ms: int) -> None:
        """Raise ProtocolError LIMIT_EXCEEDED when ``key`` would be one too many."""
        if self._count < self._most or self.get(key) is not None:
            return
        done = [key for key, state in self._all() if state.is_done()]
        for one in done:
            self.put(one, None)
        if self._count >= self._most:
            sentence = f"{self._most} queues are received in order already (pop.max_ordered_queues)"
            raise ProtocolError("LIMIT_EXCEEDED", sentence, retry_after_ms=5_000)

    def is_out(self, group: str, topics: set[str]) -> bool:
        """Whether ``group`` has messages of ``topics`` whose time is not over."""
        return any(
            state.is_blocked(self.time_of(OrderKey(topic, group, queue)))
            for topic in topics
            if (states := self._table.get((topic, group))) is not None
            for queue, state in states.by_queue.items()
        )

    def out_of(self, group: str) -> dict[tuple[str, int], int]:
        """How many messages of each topic and queue ``group`` has received in order, and their time is not over."""
        mine = ((key, state) for key, state in self._all() if key.group == group)
        counts = {(key.topic, key.queue): state.out_count(self.time_of(key)) for key, state in mine}
        return {queue: count for queue, count in counts.items() if count}

    def next_end_ms(self) -> int | None:
        """When a block ends; it may turn out to last."""
        return self._ends[0][0] if self._ends else None

    def ended(self, now_ms: int) -> set[OrderKey]:
        """The queues whose blocks may have ended by now; each is told once."""
        found = set()
        while self._ends and self._ends[0][0] <= now_ms:
            found.add(heapq.heappop(self._ends)[1])
        return found

    def look_after(self, monotonic_ms: int, topics: TopicViews) -> None:
        """Forget and write down what no request has changed, from time to time."""
        if monotonic_ms >= self._forget_at_ms and not topics.is_stale:
            self._forget_at_ms = monotonic_ms + _FORGET_MS
            views = topics.get
            self.forget_old(
                now_ms(), lambda name, queue: (view := views(name)) is not None and queue < view.read_queues
            )
        with contextlib.suppress(StoreError):  # the files stay as they are: messages may come again
            self.store()
            self._room.try_to(_FILE, partial(self.snapshot, monotonic_ms))

    def forget_old(self, now_ms: int, has_queue: Callable[[str, int], bool]) -> None:
        """Drop what RocketMQ drops when it writes the file: states of queues that ``has_queue(topic, queue)`` does not know,
        and of queues that were not received for a day. (One with a longer invisible time stays while that lasts.)
        """
        gone = [
            key
            for key, state in self._all()
            if not has_queue(key.topic, key.queue)
            or (now_ms - state.last_pop_ms > FORGET_AFTER_MS and not state.is_blocked(self.time_of(key)))
        ]
        for key in gone:
            self.put(key, None)

    # ------------------------------------------------------------ the files

    def store(self) -> None:
        """Make all changes durable. Raises StoreError, or DiskFullError; then a start finds the states before."""
        if not self._changed:
            self._room.found(_JOURNAL)  # what waited was taken back
            return
        try:
            self._store()
        except StoreError as error:
            self._room.lacked(_JOURNAL, error)
            raise
        self._room.found(_JOURNAL)

    def _store(self) -> None:
        if self._journal is not None and self._journal.failed:
            self._write_snapshot()
            return
        if self._journal is None:
            self._journal = OrdersJournal.create(self._journal_path, self._base)
        seen = [TopicSeen(topic, self._incarnations[topic]) for topic in self._seen]
        self._journal.append([*seen, *(OrderChange(*key, self.get(key)) for key in self._changed)])
        self._changed.clear()
        self._seen.clear()
        self._is_behind = True

    def snapshot(self, monotonic_ms: int, *, at_once: bool = False) -> None:
        """Write the file if it lacks something and it is time. Raises StoreError; the journal has everything."""
        if not self._is_behind or self._journal is None or self._changed:
            return
        if at_once or self._pace.is_due(monotonic_ms) or self._journal.size_bytes >= _MAX_JOURNAL_BYTES:
            self._write_snapshot()

    def _write_snapshot(self) -> None:
        """Write the file with everything, and begin a new journal. Raises StoreError."""
        assert self._journal is not None
        for names in self._touched:
            if (states := self._table.get(names)) is not None:
                self._table[names] = _States(states.by_queue)  # a new object: its text is encoded again
        self._touched.clear()
        with self._pace:
            members = {f"{topic}@{group}": states for (topic, group), states in self._table.items()}
            data = json_config.encode(json_config.dumps(file_content(self._texts.join(members))))
            name = json_config.name_of(data)
            topics = {topic for topic, _ in self._table}
            self._incarnations = {topic: one for topic, one in self._incarnations.items() if topic in topics}
            head = {"topics": self._incarnations}
            self._journal.begin_anew(name, lambda: json_config.replace_bytes(self._path, data), head)
        self._base = name
        self._changed.clear()
        self._seen.clear()
        self._is_behind = False

    def close(self, *, lost: bool = False) -> None:
        """Leave the file as RocketMQ expects it. Not with ``lost``: then a start finds more than is in memory here."""
        if not lost:
            try:
                self.snapshot(0, at_once=True)
            except StoreError as error:
                self._log.error("the state of ordered receives is in the journal only", error=str(error))
        if self._journal is not None:
            self._journal.close()
