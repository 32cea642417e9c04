"""What a send returns: where the message lies, for one message and for runs of many."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, overload

from commitmq.errors import NodeUnavailableError, Outcome, ProducerFencedError, SendError, TopicNotFoundError


class SendResult(NamedTuple):
    """Where a message was stored. Offsets: ``queue_offset`` counts messages, ``physical_offset`` bytes of the log.

    ``ack`` is what was reached (``flushed`` or ``memory``), ``msg_id`` the offset message id, ``unique_id`` the id that
    the producer gave the message. ``duplicate``: an idempotent producer sent it again and it was stored already; the rest
    is about the stored one, or -1 and empty where the node does not remember its place.

    ``stored_topic`` is None for an ordinary message. A delayed message waits in that topic of the node until it is due.
    ``queue_offset``, ``physical_offset`` and ``msg_id`` are then those of the place where it waits.

    ``node`` is the address of the node that has the message, from a producer with several nodes; else None.
    """

    topic: str
    queue: int
    queue_offset: int
    physical_offset: int
    store_timestamp: int
    msg_id: str
    unique_id: str
    ack: str
    duplicate: bool = False
    stored_topic: str | None = None
    node: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        place = f"{self.topic}/{self.queue}@{self.queue_offset}"
        again = ", duplicate" if self.duplicate else ""
        waits = "" if self.stored_topic is None else f", waits in {self.stored_topic}"
        at = "" if self.node is None else f", {self.node}"
        return f"SendResult({place}, physical_offset={self.physical_offset}, {self.ack}{again}{waits}{at})"


_tuple_of = tuple.__new__
_TWO_DIGITS: Final = [f"{number:02X}" for number in range(256)]


class RunAck:
    """The node's answer to one run. Results of its messages are made when they are looked at."""

    __slots__ = (
        "_digits",
        "_host",
        "_offsets",
        "_repeats",
        "_stored_topic",
        "ack",
        "answer",
        "count",
        "node",
        "queue",
        "sizes",
        "topic",
        "unique",
    )

    def __init__(
        self,
        topic: str,
        queue: int,
        ack: str,
        sizes: Sequence[int],
        unique: tuple[str, int] | list[str],
        answer: dict[str, Any],
    ) -> None:
        """``sizes``: bytes of each record; ``unique``: (28 characters, first counter) of a block of ids, or all ids."""
        self.topic = topic
        self.queue = queue
        self.ack = str(answer.get("ack", ack))
        self.sizes = sizes
        self.unique = unique
        self.answer = answer
        self.count = len(sizes)
        self.node: str | None = None
        """The node, where the producer has several."""
        self._offsets: list[int] | None = None
        self._repeats = "stored_before" in answer
        self._stored_topic: str | None = answer.get("stored_topic")
        self._host = self._digits = ""

    def result(self, index: int) -> SendResult:
        """The result of message ``index`` of the run."""
        if self._repeats:
            return self._repeated(index)
        answer = self.answer
        offsets = self._offsets
        if offsets is None:
            # An id is the store's host, the same for the whole run, and the physical offset as 16 digits.
            self._host = answer["msg_id"][:-16]
            offsets = self._physical_offsets()
            self._digits = struct.pack(f">{len(offsets)}Q", *offsets).hex().upper()
            self._offsets = offsets  # last: several threads may look
        physical = offsets[index]
        unique = self.unique
        if type(unique) is tuple:
            number = unique[1] + index
            unique_id = unique[0] + _TWO_DIGITS[number >> 8 & 0xFF] + _TWO_DIGITS[number & 0xFF]
        else:
            unique_id = unique[index]  # type: ignore[assignment]
        # What a named tuple's own constructor does; as a call of Python code it would be the costliest part of this.
        return _tuple_of(
            SendResult,
            (
                self.topic,
                self.queue,
                answer["queue_offset"] + index,
                physical,
                answer["store_timestamp"],
                self._host + self._digits[16 * index : 16 * index + 16],
                unique_id,
                self.ack,
                False,
                self._stored_topic,
                self.node,
            ),
        )

    def _repeated(self, index: int) -> SendResult:
        """As :meth:`result`, of a run that was stored before, all of it or its first messages."""
        answer = self.answer
        before = answer["stored_before"]
        rest = answer.get("rest") or {}
        prefix = (answer["msg_id"] or rest.get("msg_id", ""))[:-16]
        if index < len(before):
            queue_offset, physical, stamp, unique_id = before[index]
            msg_id = f"{prefix}{physical:016X}" if prefix and physical >= 0 else ""
            return SendResult(
                self.topic,
                self.queue,
                queue_offset,
                physical,
                stamp,
                msg_id,
                unique_id,
                self.ack,
                duplicate=True,
                node=self.node,
            )
        if self._offsets is None:
            self._offsets = self._physical_offsets(len(before))
        within = index - len(before)
        physical = self._offsets[within]
        msg_id = f"{prefix}{physical:016X}"
        stamp = rest["store_timestamp"]
        unique_id = self._unique_id(index)
        offset = rest["queue_offset"] + within
        return SendResult(self.topic, self.queue, offset, physical, stamp, msg_id, unique_id, self.ack, node=self.node)

    def _unique_id(self, index: int) -> str:
        unique = self.unique
        if isinstance(unique, tuple):
            return f"{unique[0]}{(unique[1] + index) & 0xFFFF:04X}"
        return unique[index]

    def _physical_offsets(self, before: int = 0) -> list[int]:
        # A run that met a segment's end lies in parts: [[count, physical offset of the first], …].
        parts = self.answer.get("parts") or [[self.count, self.answer["physical_offset"]]]
        sizes: Sequence[int] = self.sizes
        if self._stored_topic is not None:
            # Each record has become larger by the same amount: it has the topic where it waits, and two properties more.
            count, start = parts[-1]
            more = (self.answer["end_offset"] - start - int(sum(sizes[-count:]))) // count
            sizes = [size + more for size in sizes]
        offsets: list[int] = []
        for count, start in parts:
            done = before + len(offsets)
            offsets.extend(accumulate(map(int, sizes[done : done + count - 1]), initial=int(start)))
        return offsets


class BatchResult(Sequence[SendResult]):
    """Results of a batch, in the order of its messages.

    ``positions`` maps messages to places where a sharding key sent them to different queues; None when the runs hold
    the messages in order.
    """

    __slots__ = ("_ends", "_order", "acks")

    def __init__(self, acks: list[RunAck], order: list[tuple[int, int]] | None = None) -> None:
        self.acks = acks
        self._order = order
        self._ends = list(accumulate(ack.count for ack in acks))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> SendResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[SendResult]: ...
    def __getitem__(self, index: int | slice) -> SendResult | list[SendResult]:
        if isinstance(index, slice):
            return [self._at(one) for one in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError("batch result index out of range")
        return self._at(index)

    def __iter__(self) -> Iterator[SendResult]:
        return (self._at(index) for index in range(len(self)))

    def _at(self, index: int) -> SendResult:
        if self._order is not None:
            run, within = self._order[index]
            return self.acks[run].result(within)
        run = bisect_right(self._ends, index)
        return self.acks[run].result(index - (self._ends[run - 1] if run else 0))

    def places(self) -> list[tuple[int, int]]:
        """(run, index in the run) of each message."""
        if self._order is not None:
            return self._order
        return [(run, within) for run, ack in enumerate(self.acks) for within in range(ack.count)]

    @property
    def end_offset(self) -> int:
        """Physical offset after the last record of the batch."""
        return max((int(ack.answer["end_offset"]) for ack in self.acks), default=0)

    def __repr__(self) -> str:
        return f"BatchResult({len(self)} messages in {len(self.acks)} runs)"


class BatchSendError(SendError):
    """A batch was not stored as a whole.

    ``stored`` counts the messages known to be in the log, ``unknown`` those whose outcome is not known; all others are
    not stored. ``acks`` are the runs that were acknowledged; ``stored_prefix`` is how many messages from the batch's
    start on are stored without a gap (0 when sharding keys spread the batch over queues). ``outcome`` is NOT_STORED
    only if nothing of the batch was stored, UNKNOWN if any run's fate is unknown, else STORED: part of it is in the
    log.
    """

    def __new__(cls, cause: SendError, **_account: Any) -> BatchSendError:
        """Of the class that ``cause`` makes it, as :func:`commitmq.errors.send_error` says of a single send."""
        kind = cls
        if cls is BatchSendError:
            kind = next((batch for single, batch in _BATCH_ERRORS.items() if isinstance(cause, single)), cls)
        return super().__new__(kind)

    def __init__(
        self, cause: SendError, *, acks: list[RunAck], stored: int, unknown: int, total: int, stored_prefix: int
    ) -> None:
        if unknown:
            outcome = Outcome.UNKNOWN
        else:
            outcome = Outcome.STORED if stored else Outcome.NOT_STORED
        rest = total - stored - unknown
        SendError.__init__(
            self,
            cause.code,
            f"{cause.message} (of {total} messages {stored} are stored, {unknown} unknown, {rest} not stored)",
            outcome=outcome,
            retry_after_ms=cause.retry_after_ms,
        )
        self.acks = acks
        self.stored = stored
        self.unknown = unknown
        self.total = total
        self.stored_prefix = stored_prefix


class _UnansweredBatchError(BatchSendError, NodeUnavailableError):
    """A batch that failed because the node did not answer."""


class _FencedBatchError(BatchSendError, ProducerFencedError):
    """A batch of a producer whose id another one has now."""


class _TopicNotFoundBatchError(BatchSendError, TopicNotFoundError):
    """A batch to a topic that does not exist."""


_BATCH_ERRORS: dict[type[Exception], type[BatchSendError]] = {
    NodeUnavailableError: _UnansweredBatchError,
    ProducerFencedError: _FencedBatchError,
    TopicNotFoundError: _TopicNotFoundBatchError,
}
