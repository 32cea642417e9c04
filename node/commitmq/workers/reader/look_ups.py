"""Look-ups: of offsets, of messages by key or by physical offset, and of the memory that memory topics use.

Answers requests for messages by key, unique key or tag (op ``query``); part of the reader process.

Reads the index files (:mod:`commitmq.store.index.index_reader`) and the records that they point to. ``complete``
promises that no message is missing among the newer ones. It is false while the index, or the bound of readable records,
is behind the log's end (so also while the index is built again after a crash), and when the work allowed for one
request was used up before enough messages were found. The index dispatcher's position is read before the search and
after it, because a dispatcher that dies in between may go back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from commitmq.config import NodeConfig, ReaderConfig
from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.errors import OffsetOutOfRangeError, ProtocolError, StoreError
from commitmq.format.index_header import IndexShape
from commitmq.format.units import UNIT
from commitmq.protocol import wire
from commitmq.security.native_rights import SUB_GET
from commitmq.semantics.stored_topics import topics_of
from commitmq.store.index.index_reader import Cursor, Found, IndexReader, KeyKind, KeyQuery
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.memory.memory_files import NodeWord, TopicWord
from commitmq.store.queues.queue_reader import QueueReader, queues_on_disk
from commitmq.workers.reader.places import Place, Places
from commitmq.workers.reader.pulls import Answers, incarnation_field, integer_field, text_field

CONSUME_QUEUE_SLOT: Final = 0
INDEX_SLOT: Final = 1
_KINDS: Final = {"key": KeyKind.KEY, "unique": KeyKind.UNIQUE, "tag": KeyKind.TAG}
_NO_END: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class QueryRequest:
    """One request. ``up_to`` limits the search to the log below that offset; ``start`` continues behind an earlier
    answer.
    """

    query: KeyQuery
    max_messages: int
    up_to: int | None
    start: Cursor | None

    @property
    def topic(self) -> str:
        return self.query.topic


def parse_query(header: dict[str, Any], limits: ReaderConfig) -> QueryRequest:
    """The query that ``header`` asks for, its values cut down to ``limits``. Raises ProtocolError INVALID_PARAMETER."""
    topic, key = text_field(header, "topic"), text_field(header, "key")
    kind = _KINDS.get(header.get("type", "key")) if isinstance(header.get("type", "key"), str) else None
    if kind is None:
        raise ProtocolError("INVALID_PARAMETER", f"type must be one of {', '.join(_KINDS)}")
    if kind is KeyKind.KEY and " " in key:
        raise ProtocolError("INVALID_PARAMETER", "a key has no spaces: they separate the keys of a message")
    try:
        topic.encode(), key.encode()
        following = header.get("next")
        start = None if following is None else Cursor.parse(text_field(header, "next"))
    except ValueError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error
    query = KeyQuery(topic, key, kind, integer_field(header, "begin", 0), integer_field(header, "end", _NO_END))
    up_to = None if header.get("up_to") is None else integer_field(header, "up_to")
    most = min(limits.max_query_messages, integer_field(header, "max", limits.max_query_messages, 1))
    return QueryRequest(query, most, up_to, start)


class KeyQueries:
    """Answers queries; not thread-safe."""

    def __init__(
        self, config: NodeConfig, folder: Any, control: ControlBlock, commit_log: CommitLog, queues: QueueReader
    ) -> None:
        self._config = config
        self._control = control
        self._queues = queues
        self._index = IndexReader(commit_log, folder, IndexShape(config.index.hash_slots, config.index.max_items))

    def answer(self, request: QueryRequest, floor: Callable[[], int]) -> tuple[dict[str, Any], list[Any]]:
        """``(header fields, frames)`` of the answer; the frames are whole records by rising offset.

        ``floor`` returns the log offset at which the topic's readable records begin. Raises ProtocolError when there is
        no index.
        """
        if not self._config.index.enable:
            raise ProtocolError(
                "INDEX_DISABLED", "this node keeps no index: index.enable is false, or `status` says why"
            )
        for attempt in range(3):
            end = self._control.get(Word.WRITTEN)
            if request.up_to is not None:
                end = min(end, request.up_to)
            visible = self._control.dispatcher(CONSUME_QUEUE_SLOT, DispatcherWord.DISPATCHED)
            indexed = min(visible, self._indexed())
            found = self._search(request, min(visible, end), floor())
            indexed = min(indexed, self._indexed())
            try:
                frames = self._frames(found)
                break
            except OffsetOutOfRangeError:
                if attempt == 2:
                    raise  # three times a segment was deleted between the look at its records and the read
        whole = found.is_whole and indexed >= end
        fields = {
            "count": len(found.offsets),
            "complete": whole and not found.ran_out,
            "cut_short": whole and found.ran_out,
            "next": None if found.following is None else str(found.following),
            "log_end": end,
            "indexed_to": indexed,
            "last_timestamp": self._index.last_timestamp(),
        }
        return fields, frames

    def _indexed(self) -> int:
        return self._control.dispatcher(INDEX_SLOT, DispatcherWord.DISPATCHED)

    def _search(self, request: QueryRequest, visible: int, floor: int) -> Found:
        limits = self._config.reader
        return self._index.search(
            request.query,
            bound=visible,
            floor=floor,
            max_messages=request.max_messages,
            max_bytes=limits.max_pull_bytes,
            max_items=limits.max_query_items,
            start=request.start,
        )

    def _frames(self, found: Found) -> list[Any]:
        if not found.offsets:
            return []
        units = np.zeros(len(found.offsets), UNIT)
        units["physical_offset"] = found.offsets[::-1]
        units["size"] = found.sizes[::-1]
        return list(self._queues.frames(units))

    def drop_deleted_files(self) -> None:
        """Unmap index files that were deleted, so that their space is freed."""
        self._index.names()

    def close(self) -> None:
        """Close the files."""
        self._index.close()


_MOST_HIDDEN: Final = 4_096


class LookUps:
    """The operations ``offsets``, ``query``, ``memory`` and ``view`` of one reader."""

    def __init__(
        self, limits: ReaderConfig, control: ControlBlock, places: Places, key_queries: KeyQueries, answers: Answers
    ) -> None:
        self._limits, self._control = limits, control
        self._places, self._key_queries, self._answers = places, key_queries, answers

    def offsets(self, client: bytes, header: dict[str, Any]) -> None:
        """First and last queue offset of queues of a topic, and the offset of a store time.

        With ``hidden`` also those of queues with messages that lie beyond the topic's read queues.
        """
        name = text_field(header, "topic")
        topic = self._places.topic(name, incarnation_field(header))
        queues = header.get("queues")
        if queues is None:
            queues = list(range(topic.read_queues))
        if type(queues) is not list or any(type(queue) is not int for queue in queues):
            raise ProtocolError("INVALID_PARAMETER", "queues must be a list of integers")
        if len(queues) > topic.read_queues:
            raise ProtocolError("INVALID_PARAMETER", f"topic {name!r} has only {topic.read_queues} queues")
        timestamp = header.get("timestamp")
        if timestamp is not None:
            timestamp = integer_field(header, "timestamp")
        boundary = header.get("boundary", "lower")
        if boundary not in ("lower", "upper"):
            raise ProtocolError("INVALID_PARAMETER", "boundary must be lower or upper")
        hidden_too = header.get("hidden", False)
        if type(hidden_too) is not bool:
            raise ProtocolError("INVALID_PARAMETER", "hidden must be true or false")
        place = self._places.place(name, topic)
        if not topic.is_memory and not self._places.topics.is_cleared(name):
            place = self._places.nowhere()
        for queue in queues:
            self._places.check_queue(name, topic, queue)
        rows = [_row(place, name, queue, timestamp, boundary) for queue in queues]
        answer: dict[str, Any] = {"queues": rows, "log_generation": self._places.cuts.generation}
        if hidden_too:
            beyond = [one for one in queues_on_disk(place.queues.folder, name) if one >= topic.read_queues]
            hidden = [_row(place, name, queue, timestamp, boundary) for queue in beyond[:_MOST_HIDDEN]]
            answer["hidden"] = [row for row in hidden if row[1] != row[2]]
        self._answers.send(client, wire.ok(header["id"], **answer))

    def query(self, client: bytes, header: dict[str, Any]) -> None:
        """Messages of a key, found in the index; with ``deleted`` how many there are, also of a topic that was deleted."""
        query = parse_query(header, self._limits)
        deleted = header.get("deleted", False)
        if type(deleted) is not bool:
            raise ProtocolError("INVALID_PARAMETER", "deleted must be true or false")
        if deleted:
            fields, _ = self._key_queries.answer(query, lambda: self._control.get(Word.MIN_OFFSET))
            self._answers.send(client, wire.ok(header["id"], **fields))
            return
        topic = self._places.topic(query.topic)
        if not topic.is_readable:
            raise ProtocolError("NO_PERMISSION", f"topic {query.topic!r} may not be read")
        if topic.is_memory:
            raise ProtocolError("INVALID_PARAMETER", f"topic {query.topic!r} is kept in memory, where no index is made")
        fields, frames = self._key_queries.answer(query, lambda: self._places.floor(query.topic))
        self._answers.send(client, wire.ok(header["id"], **fields), frames)

    def memory_use(self, client: bytes, header: dict[str, Any]) -> None:
        """The memory that memory topics use: of the whole budget, and of one topic if the request names it."""
        page = self._places.memory.page()
        words = (NodeWord.BUDGET, NodeWord.USED, NodeWord.SEGMENT_BYTES, NodeWord.EVICTED, NodeWord.TOPICS)
        budget, used, segment, evicted, topics = (0,) * 5 if page is None else (page.get(word) for word in words)
        answer: dict[str, Any] = {
            "budget_bytes": budget,
            "used_bytes": used,
            "segment_bytes": segment,
            "evicted_segments": evicted,
            "topics": topics,
        }
        if "topic" in header:
            name = text_field(header, "topic")
            topic = self._places.topic(name)
            if not topic.is_memory:
                raise ProtocolError("INVALID_PARAMETER", f"topic {name!r:.300} is not kept in memory")
            found = self._places.memory.get(name, topic.incarnation)
            answer["topic_used_bytes"] = 0 if found is None else found.head.get(TopicWord.USED)
            answer["topic_evicted_segments"] = 0 if found is None else found.head.get(TopicWord.EVICTED)
        self._answers.send(client, wire.ok(header["id"], **answer))

    def view(self, client: bytes, header: dict[str, Any]) -> None:
        """One message at its physical offset."""
        offset = integer_field(header, "physical_offset")
        name = header.get("topic")
        if name is not None and (known := self._places.topic(text_field(header, "topic"))).is_memory:
            place = self._places.place(str(name), known)
        else:
            # A flushed message is found by its place as soon as its producer has the answer; queues show it a moment later.
            bound = max(self._places.bound(), self._control.get(Word.FLUSHED))
            place = Place(self._places.queues, self._places.log, bound, self._control.get(Word.MIN_OFFSET))
        record = None
        if place.floor <= offset < place.bound:
            try:
                record = place.log.record(offset)
            except StoreError:
                record = None
        hidden_below = 0 if record is None or place.in_memory else self._places.topics.tombstone(record.topic)
        if record is None or offset + record.total_size > place.bound or offset < hidden_below:
            raise ProtocolError("INVALID_PARAMETER", f"no message begins at physical offset {offset}")
        # A place does not tell its topic, so that of what is there decides.
        if (why := self._answers.lacks(header, topics_of(record.topic, record.properties), SUB_GET)) is not None:
            raise ProtocolError("NO_PERMISSION", why)
        topic = self._places.topics.get(record.topic)
        if topic is not None and not topic.is_readable:
            raise ProtocolError("NO_PERMISSION", f"topic {record.topic!r} may not be read")
        frame = bytes(place.log.read(offset, record.total_size))
        self._answers.send(client, wire.ok(header["id"], size=record.total_size), [frame])


def _row(place: Place, topic: str, queue: int, timestamp: int | None, boundary: str) -> list[int | None]:
    """Queue, first offset, next offset, and the offset of ``timestamp``."""
    bound, floor = place.bound, place.floor
    low, high = place.queues.bounds(topic, queue, bound=bound, floor=floor) or (0, 0)
    if timestamp is None:
        return [queue, low, high, None]
    found = place.queues.offset_by_time(topic, queue, timestamp, upper=boundary == "upper", bound=bound, floor=floor)
    return [queue, low, high, low if found is None else found]
