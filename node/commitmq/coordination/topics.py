"""The topics of a node: ``config/topics.json`` (RocketMQ's), their limits, and how one is deleted without a trace of it
coming back.

Creations of one turn of the coordinator's loop are staged and written together by :meth:`Topics.write`: at 100,000
topics the file is 25 MB, so writing it once a topic would make creating many of them quadratic.

Deleting takes more than one file. ``commitmq/deleted_topics.json`` has the tombstones ``{name: physical offset}``:
records of that topic below that offset belong to a topic that is gone, also after a new one of the same name was
created. The steps, each durable before the next begins:

1. ``commitmq/deleting_topics.json``, the intent, gets ``{name: offset}``. From here on the topic is deleted: every
   later failure is repaired by doing the rest again, never by bringing it back.
2. The tombstone is written.
3. ``topics.json`` is written without the topic.
4. The groups' offsets of it are dropped through the offsets journal.
5. The intent is taken back.

A crash before 1 leaves the topic as it was. A crash between any later two leaves an intent, and :meth:`Topics.load`
has the topic in :attr:`Topics.deleting`: the coordinator does steps 2 to 5 before it serves. All of them can be done
twice: the tombstone only grows, and what is gone cannot go again. While an intent is there no topic of that name can
be created, so the repair never meets a newer topic. Without the intent a crash between 2 and 3 would leave a topic
whose messages had vanished, and one between 3 and 4 a topic whose next incarnation starts with its predecessor's
group offsets.

Sends go on until the writer hears of the deletion, so records of the topic may lie above the tombstone; a new topic
of the name would show them. They were sent to a topic while it was being deleted, where either outcome is right.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from commitmq.errors import InvalidMessageError, ProtocolError, StoreError
from commitmq.store import json_config
from commitmq.store.format import LMQ_PREFIX
from commitmq.store.layout import StoreLayout
from commitmq.store.topic_config import (
    PERM_READ,
    PERM_WRITE,
    QUEUE_TYPE,
    QUEUE_TYPE_BATCH,
    QUEUE_TYPE_SIMPLE,
    STORAGE_CREATED,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    TopicConfig,
    TopicTable,
)
from commitmq.store.topic_name import is_send_forbidden, validate_topic

MAX_QUEUES: Final = 4_096  # of one topic; an assignment of them all must fit a header
_PERM_LIMIT: Final = 8  # RocketMQ's valid permissions are below its priority bit (spec 1.4)
_SYSTEM_PREFIX: Final = "rmq_sys_"
_SYSTEM_TOPICS: Final = frozenset({"TBW102", "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC"})

# Attributes that RocketMQ knows (spec 1.4), and one of our own, with the values that this node serves; None: any integer.
# RocketMQ loads a topics.json with an attribute that it does not know and keeps it: to it, a memory topic is a topic
# without messages.
_ATTRIBUTES: Final[Mapping[str, frozenset[str] | None]] = {
    STORAGE_TYPE: frozenset({"log", STORAGE_MEMORY}),
    "queue.type": frozenset({QUEUE_TYPE_SIMPLE, QUEUE_TYPE_BATCH}),
    "cleanup.policy": frozenset({"DELETE"}),
    "message.type": frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED"}),
    "reserve.time": None,
}
# What a topic's messages are kept in and how cannot change under them: fixed when the topic is made, with the defaults.
_FIXED_ATTRIBUTES: Final[Mapping[str, str]] = {
    STORAGE_TYPE: "log",
    QUEUE_TYPE: QUEUE_TYPE_SIMPLE,
    "cleanup.policy": "DELETE",
    STORAGE_CREATED: "",
}
# What a memory topic can be besides: plain queues of plain messages.
_KEPT_IN_MEMORY: Final[Mapping[str, tuple[str, ...]]] = {
    QUEUE_TYPE: (QUEUE_TYPE_SIMPLE,),
    "message.type": ("NORMAL", "UNSPECIFIED", "FIFO"),
}


def is_system(name: str) -> bool:
    """True for topics that the node or RocketMQ made for itself: nobody else creates or deletes them."""
    return is_send_forbidden(name) or name.startswith(_SYSTEM_PREFIX) or name in _SYSTEM_TOPICS


def describe(topic: TopicConfig) -> dict[str, Any]:
    """A topic as the protocol shows it."""
    return {
        "name": topic.name,
        "read_queues": topic.read_queues,
        "write_queues": topic.write_queues,
        "perm": topic.perm,
        "attributes": topic.attributes,
        "system": is_system(topic.name),
    }


class Topics:
    """All topics. Changes are in memory at once and on disk after :meth:`write`."""

    def __init__(
        self,
        layout: StoreLayout,
        table: TopicTable,
        *,
        auto_create: bool,
        default_queues: int,
        max_topics: int,
        lmq: bool,
    ) -> None:
        """Use :meth:`load`."""
        self._lmq = lmq
        self._path = layout.config / "topics.json"
        self._tombstones_path = layout.own / "deleted_topics.json"
        self._intent_path = layout.own / "deleting_topics.json"
        self.table = table
        self.tombstones: dict[str, int] = {}
        self.deleting: dict[str, int] = {}  # decided (the intent is durable), not yet finished
        self._auto_create = auto_create
        self._default_queues = default_queues
        self._max_topics = max_topics
        self.changed: list[str] = []  # written since the coordinator last emptied this list
        self._undo: dict[str, TopicConfig | None] = {}  # staged changes: name -> what was there before
        self._old_version = replace(table.version)

    @classmethod
    def load(
        cls, layout: StoreLayout, *, auto_create: bool, default_queues: int, max_topics: int, lmq: bool = False
    ) -> Topics:
        """Load a store's topics. Raises StoreError for files that cannot be read in either generation.

        With ``lmq`` every light message queue (``%LMQ%…``) is served as a topic of one queue that can be read, without
        being in the table.
        """
        table = TopicTable.load(layout.config / "topics.json")
        topics = cls(
            layout, table, auto_create=auto_create, default_queues=default_queues, max_topics=max_topics, lmq=lmq
        )
        topics.tombstones = _load_offsets(topics._tombstones_path)
        topics.deleting = _load_offsets(topics._intent_path)
        for name in topics.deleting:
            table.topics.pop(name, None)
        return topics

    # ------------------------------------------------------------ reading

    def get(self, name: str) -> TopicConfig:
        """The topic, or what an LMQ is as one; ProtocolError TOPIC_NOT_EXIST."""
        topic = self._find(name)
        if topic is None:
            raise ProtocolError("TOPIC_NOT_EXIST", f"there is no topic {name!r}")
        return topic

    def _find(self, name: str) -> TopicConfig | None:
        topic = self.table.topics.get(name)
        if topic is None and self._is_lmq(name):
            return TopicConfig(name, 1, 1, PERM_READ)
        return topic

    def _is_lmq(self, name: str) -> bool:
        return self._lmq and name.startswith(LMQ_PREFIX)

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self.table.topics)

    def readable_queues(self, name: str) -> range:
        """Queue ids that consumers of the topic share; none when it does not exist or may not be read."""
        topic = self._find(name)
        return range(topic.read_queues if topic is not None and topic.perm & PERM_READ else 0)

    def check_queue(self, name: str, queue: int) -> None:
        """Raise TOPIC_NOT_EXIST or INVALID_PARAMETER unless the topic has this queue to read or to write."""
        topic = self.get(name)
        count = max(topic.read_queues, topic.write_queues)
        if not 0 <= queue < count:
            raise ProtocolError("INVALID_PARAMETER", f"topic {name} has queues 0..{count - 1}, not {queue}")

    # ------------------------------------------------------------ changing

    def route(self, name: str, *, create: bool) -> TopicConfig:
        """The topic for a send or a pull; ``create`` makes an unknown one, if ``topics.auto_create`` is on.

        ProtocolError INVALID_PARAMETER (bad name), TOPIC_NOT_EXIST, NO_PERMISSION (a system topic), LIMIT_EXCEEDED.
        """
        topic = self.table.topics.get(name)
        if topic is not None:
            return topic
        check_name(name)
        if self._is_lmq(name):
            return self.get(name)
        if not create:
            return self.get(name)
        if is_system(name):
            raise ProtocolError("NO_PERMISSION", f"{name} is a system topic and is not made by sending to it")
        if not self._auto_create:
            raise ProtocolError("TOPIC_NOT_EXIST", f"there is no topic {name!r}, and topics.auto_create is off")
        return self._put(TopicConfig(name, self._default_queues, self._default_queues))

    def create(
        self,
        name: str,
        queues: int | None = None,
        *,
        perm: int = PERM_READ | PERM_WRITE,
        attributes: Mapping[str, str] | None = None,
        update: bool = False,
    ) -> bool:
        """Create a topic; False when it exists with the same settings.

        With ``update`` an existing one gets the settings: more or fewer queues, permission, attributes. Those that
        cannot change (``storage.type``, ``queue.type``, ``cleanup.policy``) stay when they are not named.
        ProtocolError INVALID_PARAMETER (name, number, permission, attribute, or it exists with other settings),
        NO_PERMISSION (a system topic), LIMIT_EXCEEDED.
        """
        check_name(name)
        queues = self._default_queues if queues is None else queues
        if not 1 <= queues <= MAX_QUEUES:
            raise ProtocolError("INVALID_PARAMETER", f"queues={queues} must be between 1 and {MAX_QUEUES}")
        if not 0 <= perm < _PERM_LIMIT:
            raise ProtocolError(
                "INVALID_PARAMETER", f"perm={perm} must be a sum of 4 (read), 2 (write) and 1 (inherit)"
            )
        wanted = dict(attributes or {})
        _check_attributes(wanted)
        _check_combination(wanted)
        if is_system(name):
            raise ProtocolError("NO_PERMISSION", f"{name} is a system topic")
        if self._is_lmq(name):
            raise ProtocolError("NO_PERMISSION", f"{name} is an LMQ: it exists by itself, once a message names it")
        known = self.table.topics.get(name)
        if known is None:
            if wanted.get(STORAGE_TYPE) == STORAGE_MEMORY:
                wanted[STORAGE_CREATED] = str(time.time_ns() // 1_000_000)
            self._put(TopicConfig(name, queues, queues, perm, wanted))
            return True
        if STORAGE_CREATED in known.attributes and wanted.get(STORAGE_TYPE) == STORAGE_MEMORY:
            wanted[STORAGE_CREATED] = known.attributes[STORAGE_CREATED]
        if (known.read_queues, known.write_queues, known.perm, known.attributes) == (queues, queues, perm, wanted):
            return False
        if not update:
            raise ProtocolError(
                "INVALID_PARAMETER",
                f"topic {name} exists with other settings: "
                f"{known.read_queues} read and {known.write_queues} write queues, "
                f"perm {known.perm}, attributes {known.attributes}",
            )
        wanted = {**{key: known.attributes[key] for key in _FIXED_ATTRIBUTES if key in known.attributes}, **wanted}
        for key, default in _FIXED_ATTRIBUTES.items():
            if wanted.get(key, default) != known.attributes.get(key, default):
                raise ProtocolError(
                    "INVALID_PARAMETER",
                    f"attribute {key} of topic {name} is {known.attributes.get(key, default)} and cannot change;"
                    " delete the topic and make it again",
                )
        _check_combination(wanted)
        self._put(replace(known, read_queues=queues, write_queues=queues, perm=perm, attributes=wanted))
        return True

    def _put(self, topic: TopicConfig) -> TopicConfig:
        known = self.table.topics.get(topic.name)
        if topic.name in self.deleting:
            raise ProtocolError(
                "SERVICE_NOT_AVAILABLE", f"topic {topic.name} is just being deleted", retry_after_ms=200
            )
        if known is None and len(self.table.topics) >= self._max_topics:
            raise ProtocolError("LIMIT_EXCEEDED", f"the node has {self._max_topics} topics (topics.max_topics)")
        if not self._undo:
            self._old_version = replace(self.table.version)
        self._undo.setdefault(topic.name, known)
        self.table.put(topic)
        return topic

    def write(self) -> None:
        """Make staged changes durable and note them in :attr:`changed`. StoreError: they are taken back."""
        if self._undo:
            try:
                self.table.persist(self._path)
            except StoreError:
                self.take_back()
                raise
            self._note_written()

    def _note_written(self) -> None:
        self.changed += self._undo
        self._undo.clear()

    def is_staged(self, name: str) -> bool:
        """True while the topic's creation or change is not on disk and may still be taken back."""
        return name in self._undo

    def take_back(self) -> None:
        """Undo what is staged. Who has seen it must look again, so the names count as changed."""
        if not self._undo:
            return
        self.changed += self._undo
        for name, before in self._undo.items():
            if before is None:
                self.table.topics.pop(name, None)
            else:
                self.table.topics[name] = before
        self._undo.clear()
        self.table.version = replace(self._old_version)

    # ------------------------------------------------------------ deleting

    def delete(self, name: str, end_offset: int) -> None:
        """Decide that ``name`` is deleted (step 1): its records below physical ``end_offset`` are no longer its.

        ProtocolError TOPIC_NOT_EXIST, NO_PERMISSION; StoreError: nothing changed. A topic that was created in the same
        turn is written first, so that taking it back later cannot revive it.
        """
        check_name(name)
        if name in self.deleting:
            return
        if self._is_lmq(name) and name not in self.table.topics:
            raise ProtocolError("NO_PERMISSION", f"{name} is an LMQ: it goes with the messages in it")
        self.get(name)
        if is_system(name):
            raise ProtocolError("NO_PERMISSION", f"{name} is a system topic")
        self.write()
        json_config.persist(self._intent_path, {**self.deleting, name: end_offset})
        self.deleting[name] = end_offset
        self.table.remove([name])

    def write_deletions(self, end_offset: int, min_offset: int) -> list[str]:
        """Steps 2 and 3 for everything in :attr:`deleting`; returns the names. Raises StoreError; do it again then.

        ``end_offset`` is the log's end now: a deletion that a crash interrupted also covers what came since.
        Tombstones at or below the log's ``min_offset`` have no record left to hide and go.
        """
        if self.deleting:
            kept = {name: offset for name, offset in self.tombstones.items() if offset > min_offset}
            for name, offset in self.deleting.items():
                kept[name] = max(offset, end_offset, kept.get(name, 0))
            json_config.persist(self._tombstones_path, kept)
            self.tombstones = kept
            self.table.persist(self._path)
            self._note_written()
        return list(self.deleting)

    def finish_deletions(self) -> None:
        """Step 5. Raises StoreError; the intents stay then."""
        if self.deleting:
            json_config.persist(self._intent_path, {})
            self.deleting.clear()


def _load_offsets(path: Path) -> dict[str, int]:
    data = json_config.load(path) or {}
    try:
        return {str(name): int(offset) for name, offset in data.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise StoreError(f"not a table of topics and offsets: {error}", path=path) from error


def check_name(name: str) -> None:
    try:
        validate_topic(name)
    except InvalidMessageError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error


def _check_attributes(attributes: Mapping[str, str]) -> None:
    for name, value in attributes.items():
        if name not in _ATTRIBUTES:
            raise ProtocolError(
                "INVALID_PARAMETER", f"attribute {name!r} is unknown; known are {', '.join(_ATTRIBUTES)}"
            )
        served = _ATTRIBUTES[name]
        if served is None:
            try:
                int(value)
            except ValueError:
                raise ProtocolError("INVALID_PARAMETER", f"attribute {name}={value!r} must be an integer") from None
        elif value not in served:
            raise ProtocolError(
                "INVALID_PARAMETER", f"attribute {name}={value!r}: this node serves {', '.join(sorted(served))}"
            )


def _check_combination(attributes: Mapping[str, str]) -> None:
    if attributes.get(STORAGE_TYPE) == STORAGE_MEMORY:
        for name, kept in _KEPT_IN_MEMORY.items():
            if attributes.get(name, kept[0]) not in kept:
                raise ProtocolError("INVALID_PARAMETER", f"a memory topic cannot have {name}={attributes[name]}")
