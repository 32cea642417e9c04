"""Queries: the messages of a topic by key, unique key or tag, or by store time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from commitmq.errors import CorruptRecordError, ProtocolError
from commitmq.format.constants import MIN_RECORD_BYTES

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message
    from commitmq.client.receiving.batch import MessageBatch
    from commitmq.client.receiving.part import RecordBatch

Request = Callable[[str, str, dict[str, Any]], "tuple[dict[str, Any], list[zmq.Frame]]"]

# Physical offset, queue id, queue offset, and a part with one message.
Row: TypeAlias = "tuple[int, int, int, RecordBatch]"

_LAG_PAUSE_S = 0.01
_PULL_MESSAGES = 1_000


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query: ``messages``, in the order of the log.

    ``complete``: no message is missing in the part of the log that the query covered. ``next``: give it as
    ``continue_from`` to continue; it is None when the query has covered everything. ``log_end`` is the end of the log
    at the query, and ``indexed_to`` the end of the index, both in bytes. ``last_timestamp`` is the store time (ms) of
    the newest record in the index. These three are -1 after a query by time.
    """

    messages: MessageBatch
    complete: bool
    next: str | None
    log_end: int = -1
    indexed_to: int = -1
    last_timestamp: int = -1

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)


def milliseconds(when: int | datetime | None) -> int | None:
    """A store time in milliseconds, as in the protocol."""
    return int(when.timestamp() * 1000) if isinstance(when, datetime) else when


def by_key(
    request: Request,
    fields: dict[str, Any],
    max_messages: int,
    continue_from: str | None,
    *,
    wait_s: float,
    timeout_s: float,
) -> QueryResult:
    """Ask until the query has ``max_messages``, has covered everything, or ``timeout_s`` is over.

    The node limits the work of one request, so a query may need several. The query covers the log up to its end at the first
    request. If the index is behind this end, the query waits up to ``wait_s`` for it.
    """
    started = time.monotonic()
    pages: list[list[memoryview]] = []
    count = 0
    complete = True
    following = continue_from
    end: int | None = None
    while True:
        ask = {**fields, "max": max_messages - count, "next": following, "up_to": end}
        answer, frames = request("reader", "query", {name: value for name, value in ask.items() if value is not None})
        end = answer["log_end"]
        waited = time.monotonic() - started
        if answer["indexed_to"] < end and waited < wait_s:
            time.sleep(_LAG_PAUSE_S)
            continue
        pages.append([frame.buffer for frame in frames])
        count += answer["count"]
        following = answer["next"]
        goes_on = following is not None and count < max_messages and waited < timeout_s
        complete = complete and (answer["complete"] or (goes_on and answer["cut_short"]))
        if not goes_on:
            break
    return QueryResult(
        # Within a page offsets rise, but the later pages have the older messages.
        batch_of(
            fields["topic"],
            [frame for page in reversed(pages) for frame in page],
            frozenset({fields["key"]}) if fields["type"] == "tag" else None,
        ),
        complete,
        following,
        end or 0,
        answer["indexed_to"],
        answer["last_timestamp"],
    )


def by_time(
    request: Request, topic: str, begin: int | None, end: int | None, max_messages: int, continue_from: str | None
) -> QueryResult:
    """The messages of all queues that were stored from ``begin`` to ``end`` (ms), the oldest first."""
    from commitmq.client.receiving.batch import MessageBatch

    positions = _positions(request, topic, begin, continue_from)
    rows: list[Row] = []
    ends: dict[int, int | None] = {}
    for queue, offset in positions.items():
        ends[queue] = _pull(request, topic, queue, offset, end, max_messages, rows)
    rows.sort(key=itemgetter(0, 1, 2))
    for _, queue, offset, _ in reversed(rows[max_messages:]):
        ends[queue] = offset  # the oldest message that was omitted comes last here, and decides
    left = {queue: offset for queue, offset in ends.items() if offset is not None}
    following = ",".join(f"{queue}:{offset}" for queue, offset in sorted(left.items())) or None
    return QueryResult(MessageBatch([row[3] for row in rows[:max_messages]]), True, following)


def _positions(request: Request, topic: str, begin: int | None, continue_from: str | None) -> dict[int, int]:
    """The queue offset to begin at, by queue id."""
    if continue_from is not None:
        try:
            pairs = [pair.split(":") for pair in continue_from.split(",")]
            return {int(queue): int(offset) for queue, offset in pairs}
        except ValueError as error:
            raise ValueError(f"{continue_from!r} is no place to continue a query by time from") from error
    answer, _ = request("reader", "offsets", {"topic": topic, "timestamp": begin or 0})
    return {queue: by_time for queue, _, _, by_time in answer["queues"]}


def _pull(
    request: Request,
    topic: str,
    queue: int,
    offset: int,
    end: int | None,
    most: int,
    rows: list[Row],
) -> int | None:
    """Append up to ``most`` messages of one queue. Returns the offset to continue at, None at ``end`` or at the queue's
    end.
    """
    count = 0
    while count < most:
        fields = {"topic": topic, "queue": queue, "offset": offset, "max_messages": min(most - count, _PULL_MESSAGES)}
        answer, frames = request("reader", "pull", fields)
        for part in _parts(topic, queue, [frame.buffer for frame in frames], offset):
            heads = part.heads
            columns = (heads["physical_offset"], heads["queue_offset"], heads["store_timestamp"])
            for index, (physical, number, stored) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
                if end is not None and stored > end:
                    return None
                rows.append((physical, queue, number, part.cut(index, index + 1)))
            count += len(part)
        if answer["next_offset"] <= offset or answer["next_offset"] >= answer["max_offset"]:
            return None
        offset = answer["next_offset"]
    return offset


def records_of(frames: Sequence[memoryview]) -> Iterator[memoryview]:
    """The records in frames; a frame has one behind the other. Raises CorruptRecordError."""
    for frame in frames:
        at = 0
        while at < len(frame):
            size = int.from_bytes(frame[at : at + 4], "big")
            if size < MIN_RECORD_BYTES or at + size > len(frame):
                raise CorruptRecordError("the answer ends inside a record", offset=at)
            yield frame[at : at + size]
            at += size


def _parts(
    topic: str, queue: int, frames: Sequence[memoryview], asked: int = 0, tags: frozenset[str] | None = None
) -> list[RecordBatch]:
    """The messages in an answer as a consumer gets them: inner batches taken apart, and LMQs with their own offsets."""
    from commitmq.client.receiving.part import parts_of_records
    from commitmq.client.receiving.record_check import check_bytes
    from commitmq.client.sending.inner_batch import expand, is_light, renumber

    parts = parts_of_records(topic, queue, frames)
    for part in parts:
        check_bytes(part)
    return [renumber(part) for part in parts] if is_light(topic) else expand(parts, asked, tags)


def batch_of(topic: str, frames: Sequence[memoryview], tags: frozenset[str] | None = None) -> MessageBatch:
    """The messages in ``frames``, of any queues of ``topic``, as a batch in the same order.

    Of an inner batch it has only the messages with one of ``tags``.
    """
    from commitmq.client.receiving.batch import MessageBatch

    runs: list[tuple[int, list[memoryview]]] = []
    for data in records_of(frames):
        queue = int.from_bytes(data[12:16], "big", signed=True)
        if not runs or runs[-1][0] != queue:
            runs.append((queue, []))
        runs[-1][1].append(data)
    return MessageBatch([part for queue, run in runs for part in _parts(topic, queue, run, tags=tags)])


def messages_of_pull(topic: str, queue: int, frames: Sequence[memoryview], asked: int) -> Iterator[Message]:
    """The messages in the answer to a pull at the offset ``asked``, each with its own offset. Raises CorruptRecordError."""
    from commitmq.client.receiving.batch import MessageBatch

    return iter(MessageBatch(_parts(topic, queue, frames, asked)))


def fields_of(
    topic: str,
    key: str | None,
    unique_key: str | None,
    tag: str | None,
    begin: int | datetime | None,
    end: int | datetime | None,
) -> dict[str, Any] | None:
    """The request of a query by one of the three kinds of key; None for a query by time. Raises ValueError."""
    given = [(kind, one) for kind, one in (("key", key), ("unique", unique_key), ("tag", tag)) if one is not None]
    if len(given) > 1:
        raise ValueError("a query has one of key, unique_key and tag")
    if not given:
        if begin is None and end is None:
            raise ValueError("a query needs a key, a unique key, a tag, or times")
        return None
    kind, value = given[0]
    if not value:
        raise ProtocolError("INVALID_PARAMETER", "an empty key is never indexed")
    fields = {"topic": topic, "key": value, "type": kind, "begin": milliseconds(begin), "end": milliseconds(end)}
    return {name: one for name, one in fields.items() if one is not None}
