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


_Stored = tuple[str, int, int]
"""Topic, messages, bytes."""
_Note = tuple[_Stored | None, bool, int, int, bool]
"""What was stored, whether a process of the node moved it, when the request was read, the time until it was in the log or
answered, whether its answer waits for the device.
"""


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
        self.last: _Stored | None = None
        """What the send at hand has stored."""
        self._notes: list[_Note] = []
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
            began_ns = monotonic_ns()
            self.last = None
            try:
                answer = send(identity, header, frames)
            except Exception as error:
                code = str(getattr(error, "code", "SYSTEM_ERROR"))
                self._table.count(families.SENDS_REFUSED, code).add()
                raise
            waits = type(answer) is PendingAck
            if waits:
                answer.began_ns = began_ns  # type: ignore[union-attr]
            moved = "moved" in header or header["op"] in _BY_NODE
            self._notes.append((self.last, moved, began_ns, monotonic_ns() - began_ns, waits))
            return answer

        return timed

    def acked(self, began_ns: int) -> None:
        """A send that waited for the device was answered."""
        self._acked.append(monotonic_ns() - began_ns)

    def settle(self, waiting: int) -> None:
        """At the end of a turn: count the notes when it is time; ``waiting`` sends wait for the device."""
        all_notes = self._notes
        count = len(all_notes) + len(self._acked)
        if (
            count != self._seen
            and count < _MOST_NOTES
            and (not all_notes or all_notes[-1][2] - all_notes[0][2] < _OLDEST_NS)
        ):
            self._seen = count
            return
        if waiting != self._were_waiting:
            self._were_waiting = waiting
            self._waiting.set(waiting)
        if not count:
            return
        self._seen = 0
        by_topic: dict[tuple[str, bool], list[_Stored]] = {}
        single: list[int] = []
        runs: list[int] = []
        for stored, moved, _, took_ns, _ in all_notes:
            if stored is not None:
                by_topic.setdefault((stored[0], moved), []).append(stored)
                (single if stored[1] == 1 else runs).append(took_ns)
        for (topic, moved), found in by_topic.items():
            self._count(topic, moved, found)
        self._single.observe_all(single)
        self._run.observe_all(runs)
        self._lengths.observe_all([stored[1] for found in by_topic.values() for stored in found])
        self._memory.observe_all([note[3] for note in all_notes if not note[4]])
        self._flushed.observe_all(self._acked)
        all_notes.clear()
        self._acked.clear()

    def _count(self, topic: str, moved: bool, stored: list[_Stored]) -> None:
        found = self._topics.get((topic, moved)) or self._begin(topic, moved)
        found.messages.add(sum(one[1] for one in stored))
        found.size_bytes.add(sum(one[2] for one in stored))
        if not moved:
            found.sizes.observe_all([one[2] // one[1] for one in stored])

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
