"""The requests of consumers that share queues: their fields, checked.

Pops that wait for messages, in the order of their arrival: by topic for wake-ups, by deadline, counted by client.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from commitmq.config import PopConfig
from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.semantics.pop import NORMAL, USUAL_NAMES, ReceiptHandle, RetryNames
from commitmq.semantics.pop_revive import CheckPointKey
from commitmq.store.metadata.topic_config import validate_group, validate_topic
from commitmq.store.queues.record_filter import RecordFilter
from commitmq.workers.reader.filters import Filters
from commitmq.workers.reader.pulls import integer_field, text_field

STARTS: Final = ("earliest", "latest", "last")
CLIENT_SHARE: Final = 4
"""One client may park this share of all."""


@dataclass(slots=True, eq=False)
class PopRequest:
    """A request for messages. ``start``, one of STARTS, is for queues without an offset."""

    client: bytes
    request: int
    group: str
    topics: list[str]
    max_messages: int
    invisible_ms: int
    wait_ms: int
    wanted: RecordFilter | None
    start: str
    deadline_ms: int = 0
    done: bool = False
    ordered: bool = False
    attempt: str | None = None
    """A repeated ordered receive has the same, and gets the same messages."""
    queue: int = -1
    """The only queue to look into, of the only topic; -1: all."""
    repeats_acked: bool = False
    """Whether an ordered receive has the messages again that were acked behind one that was not: RocketMQ's rule."""
    is_cut: bool = False
    """Whether the last look for its messages ended before all queues were looked into."""
    owner: bytes | str = b""
    user: str | None = None
    """Whose rates hold: the client, or that of a gateway of this node; and the user. Known only while there are rates."""
    counts_rest: bool = False
    """Whether the answer says how many messages are left in the queues that were looked into."""
    rest: int = 0
    """How many were left at the last look."""
    late: list[str] | None = None
    """Topics that begin at their first message, because they are newer than the consumer. None: it waits for no topic."""
    missing: list[str] = field(default_factory=list)
    """Topics that do not exist, for a consumer that waits for them."""


def rest_of(pop: PopRequest) -> dict[str, Any]:
    """The fields of an answer that say how many messages are left and which topics are missing, for who asked for them."""
    return {**({"rest": pop.rest} if pop.counts_rest else {}), **({} if pop.late is None else {"missing": pop.missing})}


@dataclass(slots=True)
class ParkedPops:
    """At most ``limit``."""

    limit: int
    names: RetryNames = USUAL_NAMES
    _waiting: dict[str, dict[str, dict[PopRequest, None]]] = field(
        default_factory=dict
    )  # topic -> group -> pops in order
    _heap: list[tuple[int, int, PopRequest]] = field(default_factory=list)
    _clients: Counter[bytes] = field(default_factory=Counter)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _woken: dict[tuple[str, str], list[PopRequest] | None] = field(
        default_factory=dict
    )  # by topic and group; None: all
    _last: tuple[str, str] = ("", "")

    def __len__(self) -> int:
        return self._clients.total()

    def has_room(self, client: bytes) -> bool:
        return len(self) < self.limit and self._clients[client] < max(1, self.limit // CLIENT_SHARE)

    def add(self, pop: PopRequest, now_ms: int) -> None:
        pop.deadline_ms = now_ms + pop.wait_ms
        self._clients[pop.client] += 1
        for topic in self._places(pop):
            self._waiting.setdefault(topic, {}).setdefault(pop.group, {})[pop] = None
        heapq.heappush(self._heap, (pop.deadline_ms, next(self._numbers), pop))

    def _places(self, pop: PopRequest) -> list[str]:
        """The topics of the store whose growth may end its wait."""
        return [*pop.topics, *(one for topic in pop.topics for one in self.names.read(topic, pop.group))]

    def remove(self, pop: PopRequest) -> None:
        pop.done = True
        self._clients[pop.client] -= 1
        if not self._clients[pop.client]:
            del self._clients[pop.client]
        for topic in self._places(pop):
            groups = self._waiting.get(topic, {})
            groups.get(pop.group, {}).pop(pop, None)
            if not groups.get(pop.group, True):
                del groups[pop.group]
            if not groups:
                self._waiting.pop(topic, None)
        if len(self._heap) > 2 * len(self) + 1_024:
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)

    def wake(self, topic: str) -> None:
        """``topic`` has grown."""
        for group in self._waiting.get(topic, ()):
            self._woken[topic, group] = None

    def wake_retries(self, topic: str, group: str) -> None:
        """A message of ``topic`` came back to ``group``."""
        for name in self.names.read(topic, group):
            self.wake(name)

    def wake_group(self, topic: str, group: str) -> None:
        """``topic`` may have more messages for ``group``."""
        if group in self._waiting.get(topic, ()):
            self._woken[topic, group] = None

    def wake_these(self, topics: set[str]) -> None:
        for topic in topics:
            self.wake(topic)

    def wake_all(self) -> None:
        for topic in self._waiting:
            self.wake(topic)

    @property
    def has_woken(self) -> bool:
        return bool(self._woken)

    def next_woken(self) -> list[PopRequest]:
        """The pops of one group that wait for a topic that has grown, first come first."""
        topic, group = self._last = next(iter(self._woken))
        rest = self._woken.pop(self._last)
        if rest is None:
            return list(self._waiting.get(topic, {}).get(group, ()))
        return [pop for pop in rest if not pop.done]

    def look_later(self, rest: list[PopRequest]) -> None:
        """Wake these again: the rest of the last :meth:`next_woken`."""
        if rest:
            self._woken.setdefault(self._last, rest)

    def next_deadline_ms(self) -> int | None:
        while self._heap and self._heap[0][2].done:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int) -> list[PopRequest]:
        """Remove and give those whose time is up."""
        found = []
        while (deadline := self.next_deadline_ms()) is not None and deadline <= now_ms:
            pop = self._heap[0][2]
            self.remove(pop)
            found.append(pop)
        return found

    def all(self) -> list[PopRequest]:
        return [entry[2] for entry in self._heap if not entry[2].done]


MOST_INVISIBLE_MS: Final = 2 * 86_400_000 + 3_600_000
"""No delivery is over later from now on: pop.max_invisible_ms is 2 days at most, and the clock may have been set back by an
hour. The timer takes 3 days."""
_MAX_TOPICS: Final = 64
_MAX_ATTEMPT: Final = 128
_MAX_QUEUES: Final = 1_024
_INVALID: Final = "INVALID_PARAMETER"
_OFFSET_DIGITS: Final = 18  # of any offset below 1 << 59


class DeliveryReference(NamedTuple):
    """One delivery that a consumer speaks of: the message at ``offset`` of the check point with ``key``. Messages that
    were received together share ``handle``, which has the offset of one of them.
    """

    key: CheckPointKey
    offset: int
    handle: ReceiptHandle

    def extended(self, pop_time: int, invisible_ms: int) -> str:
        """The text of the handle that the message has when its time starts over."""
        return str(self.handle._replace(queue_offset=self.offset).changed(pop_time, invisible_ms))


class BlockedQuery(NamedTuple):
    """A question whether queues of ``topic`` are blocked for ``attempt``: each queue with the group's offset in it."""

    group: str
    topic: str
    attempt: str | None
    queues: list[tuple[int, int]]


def pop_of(client: bytes, header: dict[str, Any], limits: PopConfig, filters: Filters) -> PopRequest:
    """The request ``pop``. Raises ProtocolError INVALID_PARAMETER, or FILTER_FAILED for a plugin's failure."""
    ordered, attempt, queue = header.get("ordered", False), _attempt(header), header.get("queue", -1)
    if type(ordered) is not bool:
        raise ProtocolError(_INVALID, "ordered must be true or false")
    repeats = header.get("repeats_acked", False)
    if type(repeats) is not bool:
        raise ProtocolError(_INVALID, "repeats_acked must be true or false")
    counts_rest = header.get("rest", False)
    if type(counts_rest) is not bool:
        raise ProtocolError(_INVALID, "rest must be true or false")
    if type(queue) is not int or queue < -1:
        raise ProtocolError(_INVALID, "queue must be a number, -1 for all queues")
    topics = header.get("topics")
    if type(topics) is not list or not 0 < len(topics) <= _MAX_TOPICS:
        raise ProtocolError(_INVALID, f"topics must be a list of 1 to {_MAX_TOPICS} names")
    if queue >= 0 and len(topics) > 1:
        raise ProtocolError(_INVALID, "a queue is one of one topic")
    start = header.get("start", "earliest")
    if start not in STARTS:
        raise ProtocolError(_INVALID, f"start must be one of {', '.join(STARTS)}")
    expression, kind = header.get("filter"), header.get("filter_type")
    for name, value in (("filter", expression), ("filter_type", kind)):
        if value is not None and type(value) is not str:
            raise ProtocolError(_INVALID, f"{name} must be a string")
    return PopRequest(
        client=client,
        request=header["id"],
        group=_group(header),
        topics=list(dict.fromkeys(_topic(name) for name in topics)),
        max_messages=min(limits.max_messages, integer_field(header, "max_messages", 32, 1)),
        invisible_ms=invisible_of(header, limits),
        wait_ms=min(limits.max_wait_ms, integer_field(header, "wait_ms", 0, 0)),
        wanted=filters.get(kind, expression),
        start=start,
        ordered=ordered,
        attempt=attempt if ordered else None,
        queue=queue,
        repeats_acked=repeats,
        counts_rest=counts_rest,
        late=_late(header),
    )


def asked_of(header: dict[str, Any]) -> BlockedQuery:
    """The request ``blocked``. Raises ProtocolError INVALID_PARAMETER."""
    pairs = header.get("queues")
    if type(pairs) is not list or not 0 < len(pairs) <= _MAX_QUEUES:
        raise ProtocolError(_INVALID, f"queues must be a list of 1 to {_MAX_QUEUES} pairs")
    for pair in pairs:
        if type(pair) is not list or [type(one) for one in pair] != [int, int]:
            raise ProtocolError(_INVALID, "each of queues is a pair: the queue, and the offset of the group in it")
    return BlockedQuery(
        _group(header), _topic(header.get("topic")), _attempt(header), [(pair[0], pair[1]) for pair in pairs]
    )


def invisible_of(header: dict[str, Any], limits: PopConfig, *, rounds_up: bool = False) -> int:
    """The invisible time (ms); ``rounds_up`` to the shortest. Raises INVALID_PARAMETER for one out of bounds."""
    value = integer_field(header, "invisible_ms")
    if rounds_up:
        value = max(value, limits.min_invisible_ms)
    if not limits.min_invisible_ms <= value <= limits.max_invisible_ms:
        raise ProtocolError(
            _INVALID,
            f"invisible_ms must be {limits.min_invisible_ms} to {limits.max_invisible_ms}, not {value}"
            " (pop.min_invisible_ms, pop.max_invisible_ms)",
        )
    return value


def receipts_of(
    header: dict[str, Any],
    limits: PopConfig,
    revive_queues: int,
    now_ms: int,
    known: Container[CheckPointKey] = (),
) -> list[DeliveryReference]:
    """The deliveries of ``receipts``: pairs of the popped topic and a receipt handle, all of ordered receives or none of them.

    Raises ProtocolError. A handle that this node cannot have made is refused here, before anything is stored: an ack of one
    that ends in years would be a timer that waits so long. One of a check point that is ``known`` is of this node, whatever
    the clock said when it was made.
    """
    group, pairs = _group(header), header.get("receipts")
    if type(pairs) is not list or not 0 < len(pairs) <= limits.max_acks:
        raise ProtocolError(_INVALID, f"receipts must be a list of 1 to {limits.max_acks} pairs (pop.max_acks)")
    found: list[DeliveryReference] = []
    firsts: dict[tuple[str, str], DeliveryReference] = {}
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) is not str:
            raise ProtocolError(_INVALID, "each of receipts is a pair: the topic and the receipt handle")
        delivery, _, number = pair[1].rpartition(" ")
        # The receipts of one delivery differ in their last parts only.
        first = firsts.get((pair[0], delivery))
        if first is not None and number.isascii() and number.isdigit() and len(number) <= _OFFSET_DIGITS:
            found.append(DeliveryReference(first.key, int(number), first.handle))
            continue
        receipt = firsts[pair[0], delivery] = _receipt(pair[0], pair[1], group, revive_queues, now_ms, known)
        if found and receipt.handle.is_ordered is not found[0].handle.is_ordered:
            raise ProtocolError(_INVALID, "the receipts are those of ordered receives, or none of them is")
        found.append(receipt)
    return found


def _receipt(
    topic: str, text: str, group: str, revive_queues: int, now_ms: int, known: Container[CheckPointKey]
) -> DeliveryReference:
    """The delivery of a receipt handle. Raises ProtocolError."""
    popped = _topic(topic)
    try:
        handle = ReceiptHandle.parse(text)
    except InvalidMessageError as error:
        raise ProtocolError(_INVALID, str(error)) from error
    key = CheckPointKey(
        handle.topic(popped, group), group, handle.queue_id, handle.start_offset, handle.pop_time, handle.broker_name
    )
    offset = _offset_of(handle, text, revive_queues, handle.expires_ms if key in known else now_ms)
    return DeliveryReference(key, offset, handle)


def _offset_of(handle: ReceiptHandle, text: str, revive_queues: int, now_ms: int) -> int:
    """The offset of the message. Raises ProtocolError for a handle that this node cannot have made."""
    if handle.queue_offset is None:
        raise ProtocolError(_INVALID, f"the receipt handle {text!r:.200} names no message")
    numbers = (handle.start_offset, handle.pop_time, handle.queue_id, handle.queue_offset)
    is_ours = min(numbers) >= 0 and max(numbers) < 1 << 62 and handle.invisible_ms > 0
    if handle.is_ordered:
        is_ours &= handle.flag == NORMAL  # (its times are compared with the state of its queue)
    else:
        # (The limit may have been higher when the handle was made.)
        is_ours &= 0 <= handle.revive_queue < revive_queues and handle.invisible_ms <= MOST_INVISIBLE_MS
        is_ours &= handle.expires_ms <= now_ms + MOST_INVISIBLE_MS
    if not is_ours:
        raise ProtocolError(_INVALID, f"the receipt handle {text!r:.200} is none of this node")
    return handle.queue_offset


def _late(header: dict[str, Any]) -> list[str] | None:
    late = header.get("late")
    if late is not None and (type(late) is not list or len(late) > _MAX_TOPICS):
        raise ProtocolError(_INVALID, f"late must be a list of up to {_MAX_TOPICS} names")
    return None if late is None else [_topic(name) for name in late]


def _attempt(header: dict[str, Any]) -> str | None:
    attempt = header.get("attempt")
    if attempt is not None and (type(attempt) is not str or not 0 < len(attempt) <= _MAX_ATTEMPT):
        raise ProtocolError(_INVALID, f"attempt must be a string of 1 to {_MAX_ATTEMPT} characters")
    return attempt


def _group(header: dict[str, Any]) -> str:
    group = text_field(header, "group")
    try:
        validate_group(group)
    except InvalidMessageError as error:
        raise ProtocolError(_INVALID, str(error)) from error
    return group


def _topic(name: Any) -> str:
    if type(name) is not str:
        raise ProtocolError(_INVALID, "a topic must be a string")
    try:
        validate_topic(name)
    except InvalidMessageError as error:
        raise ProtocolError(_INVALID, str(error)) from error
    return name
