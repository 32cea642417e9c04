"""Answers requests for messages by key, unique key or tag (op ``query``); part of the reader process.

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
from commitmq.errors import OffsetOutOfRangeError, ProtocolError
from commitmq.format.index_header import IndexShape
from commitmq.format.units import UNIT
from commitmq.store.index.index_reader import Cursor, Found, IndexReader, KeyKind, KeyQuery
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.reader.parked_pulls import integer_field, text_field

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
