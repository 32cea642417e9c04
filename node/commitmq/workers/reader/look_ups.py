"""Look-ups: of offsets, of messages by key or by physical offset, and of the memory that memory topics use."""

from __future__ import annotations

from typing import Any

from commitmq.config import ReaderConfig
from commitmq.control import ControlBlock, Word
from commitmq.errors import ProtocolError, StoreError
from commitmq.protocol import wire
from commitmq.security.needs import SUB_GET
from commitmq.semantics.stored_topics import topics_of
from commitmq.store.memory.memory_files import NodeWord, TopicWord
from commitmq.workers.reader.answers import Answers
from commitmq.workers.reader.key_queries import KeyQueries, parse_query
from commitmq.workers.reader.parked_pulls import incarnation_field, integer_field, text_field
from commitmq.workers.reader.places import Place, Places


class LookUps:
    """The operations ``offsets``, ``query``, ``memory`` and ``view`` of one reader."""

    def __init__(
        self, limits: ReaderConfig, control: ControlBlock, places: Places, key_queries: KeyQueries, answers: Answers
    ) -> None:
        self._limits, self._control = limits, control
        self._places, self._key_queries, self._answers = places, key_queries, answers

    def offsets(self, client: bytes, header: dict[str, Any]) -> None:
        """First and last queue offset of queues of a topic, and the offset of a store time."""
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
        place = self._places.place(name, topic)
        if not topic.is_memory and not self._places.topics.is_cleared(name):
            place = self._places.nowhere()
        bound, floor = place.bound, place.floor
        answer: list[list[int | None]] = []
        for queue in queues:
            self._places.check_queue(name, topic, queue)
            low, high = place.queues.bounds(name, queue, bound=bound, floor=floor) or (0, 0)
            by_time = None
            if timestamp is not None:
                by_time = place.queues.offset_by_time(
                    name, queue, timestamp, upper=boundary == "upper", bound=bound, floor=floor
                )
                by_time = low if by_time is None else by_time
            answer.append([queue, low, high, by_time])
        self._answers.send(client, wire.ok(header["id"], queues=answer))

    def query(self, client: bytes, header: dict[str, Any]) -> None:
        """Messages of a key, found in the index."""
        query = parse_query(header, self._limits)
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
