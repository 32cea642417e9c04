"""The queues of a consumer, its position in each, and the rules by which one thread changes them while another polls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from commitmq.client import checks
from commitmq.client.checks import Bell
from commitmq.errors import RequestError
from commitmq.protocol.channel import Channel

if TYPE_CHECKING:
    from commitmq.client.receiving.batch import MessageBatch
    from commitmq.client.receiving.part import RecordBatch


class FetchLimit(NamedTuple):
    """How much of a queue may be delivered: the limits of ``Consumer.run``.

    This many messages and bytes of records. The message that passes ``size_bytes`` still belongs to it.
    """

    messages: int
    size_bytes: int

    def messages_of(self, parts: Sequence[RecordBatch]) -> int:
        """How many of the messages in ``parts`` there is room for."""
        count, size_bytes = 0, 0
        for part in parts:
            sums = part.heads["size"].cumsum(dtype="int64") + size_bytes
            count += min(int(sums.searchsorted(self.size_bytes)) + 1, len(part))
            size_bytes = int(sums[-1])
            if size_bytes >= self.size_bytes or count >= self.messages:
                break
        return min(count, self.messages)


Queue = tuple[str, int]  # topic, queue id
Start = str | datetime | int


class Gap(NamedTuple):
    """A consumer could not continue at ``from_offset``, and jumped to ``to_offset``.

    ``reason`` is the node's status: OFFSET_TOO_SMALL (the messages expired), OFFSET_OVERFLOW_BADLY (the offset was
    behind the queue's end; also when a power cut or a repair took the messages away and new ones have come since),
    MESSAGE_WAS_REMOVING or NO_MATCHED_LOGIC_QUEUE.
    """

    topic: str
    queue: int
    from_offset: int
    to_offset: int
    reason: str


@dataclass(slots=True, eq=False)
class Chunk:
    """The messages of one answer that were not delivered yet. ``next_offset`` is where the queue continues behind them.

    ``is_taken``: a batch has all of these messages, so the consumer may ask for the ones behind.
    """

    parts: list[RecordBatch]
    count: int
    next_offset: int
    is_taken: bool = False


@dataclass(slots=True, eq=False)
class QueueState:
    """One queue. Each offset is the queue offset of the *next* message.

    * ``delivered``: the offset behind the messages that poll returned. * ``confirmed``: the value of ``delivered`` at
      the
    last call of poll. The program is done with the messages before it. * ``committed``: the group's offset as far as
    this consumer knows; -1 without one. * ``sent``: the last offset that this consumer tried to commit, with or without
    success.
    * ``settled``: the value of ``delivered`` at the last commit or at the start. While the two are equal, every message
    that was
      delivered is committed.
    * ``log_generation``: the generation of the log in which these offsets were learnt; -1 if it is not known. Every
      pull and commit carries it: after a power cut or a repair that took messages away, the node tells which offsets
      lie behind the end that the queue had then.
    * ``incarnation``: the incarnation of the topic that these offsets belong to; -1 if it is not known. Every pull and
      commit carries it, so none can reach another topic of the same name.
    """

    topic: str
    queue_id: int
    delivered: int
    confirmed: int
    committed: int
    settled: int
    sent: int = -1
    request: int = -1  # the id of the pull under way
    channel: int = -1  # the index of the reader that got the pull
    answer_by: float = 0.0
    retry_at: float = 0.0
    chunks: deque[Chunk] = field(default_factory=deque)  # answers that were not delivered; two at most
    end: int = -1  # the queue's end in the last answer
    use_bytes: bool = False  # the node sends this queue's records, because this process cannot map its segments
    careful_until: int = -1  # below this queue offset each pull asks for one message, because one of them is damaged
    revoked_at: float = 0.0  # time.monotonic() when the coordinator asked for it back
    incarnation: int = -1
    log_generation: int = -1
    is_proven: bool = True  # False while a program gave `delivered` and the node has not confirmed that it exists
    is_announced: bool = False  # on_assign was called with this queue
    is_paused: bool = False
    room: FetchLimit | None = None  # no more than that is delivered now; None: no limit

    @property
    def key(self) -> Queue:
        return self.topic, self.queue_id

    @property
    def position(self) -> int:
        """The offset of the next pull."""
        return self.chunks[-1].next_offset if self.chunks else self.delivered

    def move_to(self, offset: int) -> None:
        """Go on at ``offset``. The skipped messages count as delivered together with the messages before them."""
        if self.chunks:
            self.chunks[-1].next_offset = offset
        else:
            self.delivered = offset

    def forget(self) -> None:
        """Drop the pulled messages and the pull under way."""
        self.request = -1
        self.chunks.clear()


class BatchPortion(NamedTuple):
    """The messages of one queue in a batch: all of ``chunk``, or ``chunk`` without ``rest``, which begins at ``delivered``."""

    state: QueueState
    chunk: Chunk
    rest: Chunk | None = None
    delivered: int = -1

    def hand_out(self) -> None:
        """Count these messages as delivered. A second call changes nothing."""
        chunks = self.state.chunks
        if not chunks or chunks[0] is not self.chunk:
            return
        # In this order an interruption between the two steps does no harm: the next call does both.
        if self.rest is None:
            self.state.delivered = self.chunk.next_offset
            chunks.popleft()
        else:
            self.state.delivered = self.delivered
            self.rest.next_offset = self.chunk.next_offset
            chunks[0] = self.rest


class TakenBatch(NamedTuple):
    """A batch and its portions. It counts as delivered from the moment when it is ``Assignment.returned``."""

    batch: MessageBatch
    portions: list[BatchPortion]

    def has(self, state: QueueState) -> bool:
        return any(portion.state is state for portion in self.portions)


@dataclass
class Assignment:
    """The queues of one consumer. ``lock`` guards everything; :meth:`ring` wakes a poll that waits.

    One store hands a batch out: ``poll`` sets ``returned`` in the statement before its return. Before this store the batch has
    changed no queue. So after an exception (Ctrl-C, a signal handler, no descriptors) the next poll returns its messages. The
    positions move in :meth:`settle`, and each method that reads them calls it first.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    owned: dict[Queue, QueueState] = field(default_factory=dict)
    ready: dict[Queue, QueueState] = field(
        default_factory=dict
    )  # the queues with chunks; the first is the next in turn
    making: TakenBatch | None = None  # the newest batch, delivered or not
    returned: TakenBatch | None = None
    lost: list[Queue] = field(default_factory=list)  # announced queues that were returned without a call of on_revoke
    tells: bool = False  # the program has an on_revoke, and a queue is returned after its call
    polled_at: float = field(default_factory=time.monotonic)
    is_polling: bool = False
    room: FetchLimit | None = None  # of the queues that are added

    def __post_init__(self) -> None:
        self.bell = Bell()

    def ring(self) -> None:
        with self.lock:
            self.bell.ring()

    def close(self) -> None:
        with self.lock:
            self.bell.close()

    def settle(self) -> None:
        """Move the positions behind the last batch that poll returned."""
        with self.lock:
            taken = self.returned
            if taken is None:
                return
            for portion in taken.portions:
                portion.hand_out()
                state = portion.state
                # The turn of this queue is over, and it goes behind the others. (A state of an earlier assignment is
                # not there.)
                if self.ready.get(state.key) is state:
                    del self.ready[state.key]
                if state.chunks and self.owned.get(state.key) is state:
                    self.ready[state.key] = state
            self.making = self.returned = None

    def confirm(self) -> None:
        """Note that the program is done with every batch that it has got."""
        with self.lock:
            self.settle()
            for state in self.owned.values():
                if state.is_proven:
                    state.confirmed = state.delivered

    def is_in_hand(self, state: QueueState) -> bool:
        """Whether a message of the queue was delivered, or is in a new batch, and is not committed."""
        with self.lock:
            self.settle()
            return state.delivered != state.settled or (self.making is not None and self.making.has(state))

    def drop(self, state: QueueState, *, told: bool = False) -> None:
        """Stop to read the queue. If the program was not ``told``, the next poll tells it."""
        with self.lock:
            if self.owned.get(state.key) is state:
                del self.owned[state.key]
                if state.is_announced and not told:
                    self.lost.append(state.key)
            if self.ready.get(state.key) is state:
                del self.ready[state.key]
            state.forget()

    def restart(self, state: QueueState, offset: int) -> None:
        """Read the queue from ``offset`` on, which lies before what was delivered: those messages are gone, other ones
        have their offsets, and nothing that was done with them counts.
        """
        with self.lock:
            if self.owned.get(state.key) is not state:
                return
            begin = StartOffset(offset, offset, state.log_generation)
            fresh = new_state(state.key, begin, state.committed, state.incarnation)
            fresh.is_paused, fresh.revoked_at, fresh.end = state.is_paused, state.revoked_at, state.end
            self.drop(state)
            self.add([fresh])

    def state_of(self, key: Queue) -> QueueState:
        """The state of an assigned queue (lock held). Raises ValueError for a queue that is not assigned."""
        state = self.owned.get(key)
        if state is None:
            raise ValueError(f"queue {key[1]} of topic {key[0]!r} is not assigned to this consumer")
        return state

    def set_paused(self, queues: Iterable[Queue] | None, paused: bool) -> None:
        """Pause or resume ``queues``, None for all. Raises ValueError, and changes nothing, if one is not assigned."""
        with self.lock:
            keys = list(self.owned) if queues is None else [(topic, queue) for topic, queue in queues]
            for state in [self.state_of(key) for key in keys]:
                state.is_paused = paused

    def positions(self) -> dict[Queue, int]:
        """For each assigned queue the offset behind the last message that was delivered."""
        with self.lock:
            self.settle()
            return {key: state.delivered for key, state in self.owned.items()}

    def add(self, states: Iterable[QueueState]) -> None:
        with self.lock:
            for state in states:
                state.room = self.room
                self.owned[state.key] = state
        self.ring()

    def keys(self) -> list[Queue]:
        with self.lock:
            return list(self.owned)

    def of_old_incarnations(self, incarnations: Mapping[str, int]) -> list[Queue]:
        """The queues of topics that were deleted and recreated; ``incarnations`` are those of the topics now."""
        with self.lock:
            return [
                key
                for key, state in self.owned.items()
                if state.incarnation >= 0 and incarnations.get(key[0], state.incarnation) != state.incarnation
            ]

    def incarnations(self, queues: Iterable[Queue]) -> dict[str, int]:
        """The known incarnations that the offsets in these queues belong to, by topic."""
        with self.lock:
            states = [self.owned[key] for key in queues if key in self.owned]
        return {state.topic: state.incarnation for state in states if state.incarnation >= 0}


class StartOffset(NamedTuple):
    """Where to begin in a queue: ``offset`` was asked for, and ``committable`` is the same or the queue's end before it.
    ``log_generation``: see :class:`QueueState`.
    """

    offset: int
    committable: int
    log_generation: int = -1


def start_offsets(
    reader: Channel, queues: Iterable[Queue], start: Start, *, timeout_s: float, incarnations: Mapping[str, int]
) -> dict[Queue, StartOffset]:
    """Where to begin in ``queues``, which have no committed offset. ``incarnations`` are the known ones of their topics.

    A queue that the reader does not know yet is new and begins at 0. Raises ProtocolError.
    """
    by_topic: dict[str, list[int]] = {}
    for topic, queue in queues:
        by_topic.setdefault(topic, []).append(queue)
    result: dict[Queue, StartOffset] = {}
    for topic, ids in by_topic.items():
        fields: dict[str, Any] = {"topic": topic, "queues": ids}
        if isinstance(start, datetime):
            fields["timestamp"] = max(int(start.timestamp() * 1000), 0)
        if topic in incarnations:
            fields["incarnation"] = incarnations[topic]
        try:
            try:
                answer, _ = reader.request("offsets", fields, timeout_s=timeout_s)
            except RequestError as error:
                if error.code != "INVALID_PARAMETER":
                    raise
                # The topic has more or fewer queues by now, and reader and coordinator hear of it at different times.
                answer, _ = reader.request("offsets", {**fields, "queues": None}, timeout_s=timeout_s)
        except RequestError as error:
            if error.code != "TOPIC_NOT_EXIST":
                raise
            # The coordinator knows the topic, and the reader will hear of it soon. The topic is new, so it begins at 0.
            result.update({(topic, queue): StartOffset(0, 0) for queue in ids})
            continue
        generation = int(answer.get("log_generation", -1))
        for queue, low, high, by_time in answer["queues"]:
            if isinstance(start, int):
                result[topic, queue] = StartOffset(start, min(start, high), generation)
                continue
            if isinstance(start, datetime):
                offset = by_time if by_time is not None else low
            else:
                offset = high if start == "latest" else low
            result[topic, queue] = StartOffset(offset, offset, generation)
        for queue in ids:
            result.setdefault((topic, queue), StartOffset(0, 0))
    return result


def for_new_queues(start: Start) -> Start:
    """Where to begin in a queue that is newer than the consumer: at its first message, or at the time that ``start`` is."""
    return start if isinstance(start, datetime) else "earliest"


def check_start(start: Start) -> Start:
    """``start`` itself. Raises ValueError for a value that is no start."""
    if isinstance(start, bool) or not isinstance(start, str | datetime | int):
        raise ValueError(f"start must be 'earliest', 'latest', a datetime or an offset, not {start!r}")
    if isinstance(start, str) and start not in ("earliest", "latest"):
        raise ValueError(f"start must be 'earliest', 'latest', a datetime or an offset, not {start!r}")
    if isinstance(start, int):
        return checks.offset("a start offset", start)
    if isinstance(start, datetime):
        try:
            start.timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise ValueError(f"start must be a time that the clock can tell, not {start!r}: {error}") from None
    return start


def new_state(queue: Queue, begin: StartOffset, committed: int, incarnation: int = -1) -> QueueState:
    """A queue that is read from ``begin`` on. An offset that may lie behind the end is not committed."""
    offset, proven = begin.offset, begin.offset == begin.committable
    confirmed = offset if proven else committed
    return QueueState(
        queue[0], queue[1], offset, confirmed, committed, offset,
        incarnation=incarnation, log_generation=begin.log_generation, is_proven=proven,
    )  # fmt: skip
