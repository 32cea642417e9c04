"""What the writer, and the process of memory topics, count of sends: see :mod:`commitmq.counting.families`.

One note is taken for each request, of one message or of a run. The notes are counted (:meth:`SendCounts.settle`) when the turn
is over, after the answers have left: a sender that waits for its answer does not wait for the counting. Without
``metrics.enable`` none of this exists.
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
        self._stored: list[tuple[str, bool, int, int, int]] = []
        self._answered: list[int] = []
        self._acked: list[int] = []
        self._were_waiting = 0

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
        self._stored.append((topic, self._moved, messages, size_bytes, monotonic_ns() - self._began_ns))

    def acked(self, began_ns: int) -> None:
        """A send that waited for the device was answered."""
        self._acked.append(monotonic_ns() - began_ns)

    def settle(self, waiting: int) -> None:
        """Count what was noted; ``waiting`` sends wait for the device."""
        if waiting != self._were_waiting:
            self._were_waiting = waiting
            self._waiting.set(waiting)
        if self._stored:
            for topic, moved, messages, size_bytes, took_ns in self._stored:
                found = self._topics.get((topic, moved)) or self._begin(topic, moved)
                found.messages.add(messages)
                found.size_bytes.add(size_bytes)
                if not moved:
                    found.sizes.observe(size_bytes // messages)
                (self._single if messages == 1 else self._run).observe(took_ns)
                self._lengths.observe(messages)
            self._stored.clear()
        for notes, histogram in ((self._answered, self._memory), (self._acked, self._flushed)):
            if notes:
                for took_ns in notes:
                    histogram.observe(took_ns)
                notes.clear()

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
