"""What the writer, and the process of memory topics, count of sends: see :mod:`commitmq.counting.families`.

One note is taken for each request, of one message or of a run. The notes are counted together (:meth:`SendCounts.settle`):
when a turn brings no further one, when there are many, or when the oldest is a quarter of a second older than the newest. So
a send costs hardly more than the note, and a scrape sees it a moment later. Without ``metrics.enable`` none of this exists.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final, NamedTuple

from commitmq.counting import families
from commitmq.counting.table import Count, CountTable, Histogram
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.writer.local_sockets import Frames, Peer
from commitmq.workers.writer.send_answers import PendingAck

Send = Callable[[Peer, dict[str, Any], Frames], "bytes | PendingAck"]
_BY_NODE: Final = ("send_back", "recall")
_CLIENT, _NODE = "client", "node"
_MOST_TOPICS: Final = 10_000
_MOST_NOTES: Final = 512
_OLDEST_NS: Final = 250_000_000


_Note = tuple[str, bool, int, int, int, int]
"""Topic, whether a process of the node moved it, messages, bytes, when the request was read, how long it took."""


class _Topic(NamedTuple):
    messages: Count
    size_bytes: Count
    sizes: Histogram


class SendCounts:
    """See the module."""

    def __init__(self, table: CountTable) -> None:
        self._table = table
        self._memory = table.histogram(families.SEND_DURATION, "memory")
        self._flushed = table.histogram(families.SEND_DURATION, "flushed")
        self._single = table.histogram(families.APPEND_DURATION, "single")
        self._run = table.histogram(families.APPEND_DURATION, "run")
        self._lengths = table.histogram(families.APPEND_MESSAGES)
        self._waiting = table.count(families.SENDS_WAITING)
        self._topics: dict[tuple[str, bool], _Topic] = {}
        self._began_ns = 0
        self._moved = False
        self._stored: list[_Note] = []
        self._answered: list[int] = []
        self._acked: list[int] = []
        self._seen = self._were_waiting = 0

    @classmethod
    def of(cls, context: WorkerContext) -> SendCounts | None:
        """None where nothing is counted."""
        table = context.counts
        return None if table is None else cls(table)

    def timed_send(self, send: Send) -> Send:
        """``send`` with a look at its time and its refusal."""

        def timed(identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
            began_ns = self._began_ns = monotonic_ns()
            self._moved = "moved" in header or header["op"] in _BY_NODE
            try:
                answer = send(identity, header, frames)
            except Exception as error:
                code = str(getattr(error, "code", "SYSTEM_ERROR"))
                self._table.count(families.SENDS_REFUSED, code).add()
                raise
            if type(answer) is PendingAck:
                answer.began_ns = began_ns
            else:
                self._answered.append(monotonic_ns() - began_ns)
            return answer

        return timed

    def stored(self, topic: str, messages: int, size_bytes: int) -> None:
        """The send at hand stored these messages in ``topic``."""
        began_ns = self._began_ns
        self._stored.append((topic, self._moved, messages, size_bytes, began_ns, monotonic_ns() - began_ns))

    def acked(self, began_ns: int) -> None:
        """A send that waited for the device was answered."""
        self._acked.append(monotonic_ns() - began_ns)

    def settle(self, waiting: int) -> None:
        """At the end of a turn: count the notes when it is time; ``waiting`` sends wait for the device."""
        stored = self._stored
        notes = len(stored) + len(self._answered) + len(self._acked)
        if notes != self._seen and notes < _MOST_NOTES and (not stored or stored[-1][4] - stored[0][4] < _OLDEST_NS):
            self._seen = notes
            return
        if waiting != self._were_waiting:
            self._were_waiting = waiting
            self._waiting.set(waiting)
        if not notes:
            return
        self._seen = 0
        by_topic: dict[tuple[str, bool], list[_Note]] = {}
        for note in stored:
            by_topic.setdefault(note[:2], []).append(note)
        for (topic, moved), found in by_topic.items():
            self._count(topic, moved, found)
        self._single.observe_all([note[5] for note in stored if note[2] == 1])
        self._run.observe_all([note[5] for note in stored if note[2] != 1])
        self._lengths.observe_all([note[2] for note in stored])
        self._memory.observe_all(self._answered)
        self._flushed.observe_all(self._acked)
        for one in (stored, self._answered, self._acked):
            one.clear()

    def _count(self, topic: str, moved: bool, notes: list[_Note]) -> None:
        found = self._topics.get((topic, moved)) or self._begin(topic, moved)
        found.messages.add(sum(note[2] for note in notes))
        found.size_bytes.add(sum(note[3] for note in notes))
        if not moved:
            found.sizes.observe_all([note[3] // note[2] for note in notes])

    def dead_letter(self, topic: str, group: str) -> None:
        """A message of ``topic`` that a consumer of ``group`` sent back is a dead letter."""
        self._table.count(families.DEAD_LETTERS, topic, group).add()

    def _begin(self, topic: str, moved: bool) -> _Topic:
        table, source = self._table, _NODE if moved else _CLIENT
        if len(self._topics) >= _MOST_TOPICS:
            self._topics.clear()  # deleted topics leave no trace but their rows
        found = self._topics[topic, moved] = _Topic(
            table.count(families.MESSAGES_IN, topic, source),
            table.count(families.BYTES_IN, topic, source),
            table.histogram(families.MESSAGE_SIZE, topic),
        )
        return found
