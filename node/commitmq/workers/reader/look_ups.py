"""Look-ups: of offsets, of messages by key or by physical offset, and of the memory that memory topics use."""

from __future__ import annotations

from typing import Any, Final

from commitmq.config import ReaderConfig
from commitmq.control import ControlBlock, Word
from commitmq.errors import ProtocolError, StoreError
from commitmq.protocol import wire
from commitmq.security.native_rights import SUB_GET
from commitmq.semantics.stored_topics import topics_of
from commitmq.store.memory.memory_files import NodeWord, TopicWord
from commitmq.store.queues.queue_list import queues_on_disk
from commitmq.workers.reader.answers import Answers
from commitmq.workers.reader.key_queries import KeyQueries, parse_query
from commitmq.workers.reader.parked_pulls import incarnation_field, integer_field, text_field
from commitmq.workers.reader.places import Place, Places

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
