"""The topics of a node: their limits, and the staged changes.

Creations of one turn of the coordinator's loop are staged and written together by :meth:`Topics.write`
(:mod:`commitmq.coordination.topic_storage`).

Every topic that the node creates gets an *incarnation*, a number that no other topic of the store has or had (the
attribute ``storage.created``, see :mod:`commitmq.store.metadata.topic_config`). It tells a request for a deleted topic,
such as a late commit or a repeated deletion, from a request for the next topic of the same name.
:mod:`commitmq.coordination.deletions` describes how a topic ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from commitmq.coordination.deletions import Deletions
from commitmq.coordination.makers import TOPIC
from commitmq.coordination.topic_rules import (
    FIXED_ATTRIBUTES,
    MADE_BY_CLIENTS,
    MAX_QUEUES,
    PERM_LIMIT,
    check_attributes,
    check_combination,
    check_fixed,
    check_name,
    is_system,
)
from commitmq.coordination.topic_storage import TopicStorage
from commitmq.errors import ProtocolError, StoreError
from commitmq.format.constants import LMQ_PREFIX
from commitmq.semantics.trace import TRACE_TOPIC
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata.topic_config import (
    PERM_READ,
    PERM_WRITE,
    STORAGE_CREATED,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    TopicConfig,
)
from commitmq.store.metadata.topic_files import TopicChange, TopicTurn

_ENDING_RETRY_MS = 50


def describe(topic: TopicConfig) -> dict[str, Any]:
    """A topic as the protocol shows it."""
    return {
        "name": topic.name,
        "read_queues": topic.read_queues,
        "write_queues": topic.write_queues,
        "perm": topic.perm,
        "attributes": topic.settings,
        "incarnation": topic.incarnation,
        "system": is_system(topic.name),
    }


class Topics:
    """All topics. Changes are in memory at once and on disk after :meth:`write`."""

    def __init__(
        self,
        layout: StoreLayout,
        storage: TopicStorage,
        *,
        auto_create: bool,
        default_queues: int,
        max_topics: int,
        max_deleted: int,
        lmq: bool,
    ) -> None:
        """Use :meth:`load`."""
        self._lmq = lmq
        self.storage = storage
        self.table = table = storage.table
        self.next_version = 1  # the TOPICS_VERSION with which other processes learn of the next change
        self.deletions = Deletions.load(layout)
        self._max_deleted = max_deleted
        self.configure(auto_create=auto_create, default_queues=default_queues, max_topics=max_topics)
        self.makes: Callable[[str, str], None] = lambda kind, name: None  # may refuse
        self.changed: list[str] = []  # written since the coordinator last emptied this list
        self._undo: dict[str, TopicConfig | None] = {}  # staged changes: name -> the topic before the change
        self._old_version = replace(table.version)

    @property
    def auto_creates(self) -> bool:
        """Whether a send or a pull may make a topic."""
        return self._auto_create

    def configure(self, *, auto_create: bool, default_queues: int, max_topics: int) -> None:
        """Take the limits that may change while the process runs."""
        self._auto_create, self._default_queues, self._max_topics = auto_create, default_queues, max_topics

    @classmethod
    def load(
        cls,
        layout: StoreLayout,
        *,
        auto_create: bool,
        default_queues: int,
        max_topics: int,
        max_deleted: int = 100_000,
        lmq: bool = False,
        snapshot_interval_ms: int = 1_000,
    ) -> Topics:
        """Load a store's topics as :meth:`TopicStorage.load` does. Raises StoreError.

        With ``lmq`` every light message queue (``%LMQ%…``) is served as a readable topic of one queue, without being in
        the table.
        """
        storage = TopicStorage.load(layout, snapshot_interval_ms=snapshot_interval_ms)
        topics = cls(
            layout,
            storage,
            auto_create=auto_create,
            default_queues=default_queues,
            max_topics=max_topics,
            max_deleted=max_deleted,
            lmq=lmq,
        )
        for name in topics.deletions.endings:
            storage.table.topics.pop(name, None)
        storage.try_recover()
        return topics

    # ------------------------------------------------------------ reading

    def get(self, name: str) -> TopicConfig:
        """The topic, or an LMQ in the form of one; ProtocolError TOPIC_NOT_EXIST."""
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
        """Queue ids that consumers of the topic share; empty when the topic does not exist or may not be read."""
        topic = self._find(name)
        return range(topic.read_queues if topic is not None and topic.perm & PERM_READ else 0)

    def exists(self, name: str) -> bool:
        """Whether there is a topic, or a light message queue, of this name."""
        return self._find(name) is not None

    def is_memory(self, name: str) -> bool:
        """Whether ``name`` is a memory topic."""
        topic = self.table.topics.get(name)
        return topic is not None and topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY

    def check_queue(self, name: str, queue: int) -> None:
        """Raise TOPIC_NOT_EXIST or INVALID_PARAMETER unless the topic has this queue to read or to write."""
        topic = self.get(name)
        count = max(topic.read_queues, topic.write_queues)
        if not 0 <= queue < count:
            raise ProtocolError("INVALID_PARAMETER", f"topic {name} has queues 0..{count - 1}, not {queue}")

    def check_incarnation(self, name: str, incarnation: int | None) -> None:
        """Raise FENCED unless the topic is the one of ``incarnation``; None means any."""
        topic = self._find(name)
        if incarnation is not None and (topic is None or topic.incarnation != incarnation):
            now = "is deleted" if topic is None else f"was made anew (incarnation {topic.incarnation})"
            raise ProtocolError("FENCED", f"topic {name} of incarnation {incarnation} {now}")

    def incarnations(self, names: Iterable[str]) -> dict[str, int]:
        """The incarnations of those topics that exist."""
        found = {name: self._find(name) for name in names}
        return {name: topic.incarnation for name, topic in found.items() if topic is not None}

    # ------------------------------------------------------------ changing

    def route(self, name: str, *, create: bool) -> TopicConfig:
        """The topic for a send or a pull; ``create`` creates an unknown one, if ``topics.auto_create`` is on.

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
        if name == TRACE_TOPIC:
            return self._put(TopicConfig(name, 1, 1))  # RocketMQ makes it at its start
        if is_system(name):
            raise ProtocolError("NO_PERMISSION", f"{name} is a system topic and is not made by sending to it")
        if not self._auto_create:
            raise ProtocolError("TOPIC_NOT_EXIST", f"there is no topic {name!r}, and topics.auto_create is off")
        return self._put(TopicConfig(name, self._default_queues, self._default_queues))

    def ensure(self, name: str, queues: int) -> None:
        """Make sure that a topic of the node itself exists. Raises ProtocolError as :meth:`create`."""
        if name not in self.table.topics:
            check_name(name)
            self._put(TopicConfig(name, queues, queues))

    def create(
        self,
        name: str,
        queues: int | None = None,
        *,
        perm: int = PERM_READ | PERM_WRITE,
        attributes: Mapping[str, str] | None = None,
        update: bool = False,
        incarnation: int | None = None,
        further: Mapping[str, Any] | None = None,
    ) -> bool:
        """Create a topic; False when it exists with the same settings.

        ``further``: other fields of :class:`TopicConfig` by name, that RocketMQ's tools set; the rest stay as they are.

        With ``update`` an existing topic gets the settings: more or fewer queues, permission, attributes. The
        attributes that cannot change (``storage.type``, ``queue.type``, ``cleanup.policy``) stay when they are not
        named. With ``incarnation`` no topic is created, and only that incarnation is updated: TOPIC_NOT_EXIST.
        ProtocolError INVALID_PARAMETER (name, number, permission, attribute, or it exists with other settings),
        NO_PERMISSION (a system topic), LIMIT_EXCEEDED. The topics MADE_BY_CLIENTS may be made, not updated; the topic of
        traces with any number of queues: RocketMQ's clients pick a queue before it exists.
        """
        check_name(name)
        queues = self._default_queues if queues is None else queues
        if not 1 <= queues <= MAX_QUEUES:
            raise ProtocolError("INVALID_PARAMETER", f"queues={queues} must be between 1 and {MAX_QUEUES}")
        if not 0 <= perm < PERM_LIMIT:
            raise ProtocolError(
                "INVALID_PARAMETER", f"perm={perm} must be a sum of 4 (read), 2 (write) and 1 (inherit)"
            )
        wanted, more = dict(attributes or {}), dict(further or {})
        existing = self.table.topics.get(name)
        # An attribute that RocketMQ gave a topic may stay.
        had = {} if existing is None else existing.attributes
        check_attributes({key: value for key, value in wanted.items() if had.get(key) != value})
        check_combination(wanted)
        if is_system(name) and (name not in MADE_BY_CLIENTS or (existing is not None and update)):
            raise ProtocolError("NO_PERMISSION", f"{name} is a system topic")
        if self._is_lmq(name):
            raise ProtocolError("NO_PERMISSION", f"{name} is an LMQ: it exists by itself, once a message names it")
        known = self.table.topics.get(name)
        if incarnation is not None and (known is None or known.incarnation != incarnation):
            raise ProtocolError("TOPIC_NOT_EXIST", f"the topic {name} of incarnation {incarnation} was deleted")
        if known is None:
            self._put(replace(TopicConfig(name, queues, queues, perm, wanted), **more))
            return True
        changed = replace(known, **{"read_queues": queues, "write_queues": queues, "perm": perm, **more})
        if changed == known and known.settings == wanted:
            return False
        if not update:
            raise ProtocolError(
                "INVALID_PARAMETER",
                f"topic {name} exists with other settings: "
                f"{known.read_queues} read and {known.write_queues} write queues, "
                f"perm {known.perm}, attributes {known.settings}",
            )
        wanted = {**{key: known.attributes[key] for key in FIXED_ATTRIBUTES if key in known.attributes}, **wanted}
        check_fixed(name, known.attributes, wanted)
        check_combination(wanted)
        if STORAGE_CREATED in known.attributes:
            wanted[STORAGE_CREATED] = known.attributes[STORAGE_CREATED]
        self._put(replace(changed, attributes=wanted))
        return True

    def make_own(self, names: Iterable[str]) -> None:
        """Make those of the node's own topics ``names`` that are not there, each with one queue, as RocketMQ does."""
        for name in names:
            if name not in self.table.topics:
                self._put(TopicConfig(name, 1, 1))

    def _put(self, topic: TopicConfig) -> TopicConfig:
        known = self.table.topics.get(topic.name)
        if self.deletions.is_ending(topic.name):
            raise ProtocolError(
                "SERVICE_NOT_AVAILABLE",
                f"topic {topic.name} is just being deleted; a new one can be made as soon as that is done",
                retry_after_ms=_ENDING_RETRY_MS,
            )
        if known is None and len(self.table.topics) >= self._max_topics:
            raise ProtocolError("LIMIT_EXCEEDED", f"the node has {self._max_topics} topics (topics.max_topics)")
        if known is None:
            self.makes(TOPIC, topic.name)
        if not self._undo:
            self._old_version = replace(self.table.version)
        self._undo.setdefault(topic.name, known)
        if known is None:
            made = str(self.table.next_incarnation())
            topic = replace(topic, attributes={**topic.attributes, STORAGE_CREATED: made})
        self.table.put(topic)
        return topic

    def write(self) -> None:
        """Make staged changes durable and note them in :attr:`changed`. With a StoreError they are undone."""
        if self._undo:
            try:
                self._append([])
            except StoreError:
                self.take_back()
                raise

    def _append(self, drops: list[TopicChange]) -> None:
        """Make ``drops`` and everything staged durable in the journal."""
        puts = [TopicChange(name, topic := self.table.topics[name], topic.incarnation) for name in self._undo]
        turn = TopicTurn(self.next_version, replace(self.table.version), (*drops, *puts))
        self.storage.append(turn)
        self._note_written()

    def _note_written(self) -> None:
        self.changed += self._undo
        self._undo.clear()

    @property
    def has_staged(self) -> bool:
        """Whether :meth:`write` has something to do."""
        return bool(self._undo)

    def is_staged(self, name: str) -> bool:
        """True while the topic's creation or change is not on disk and may still be taken back."""
        return name in self._undo

    def take_back(self) -> None:
        """Undo the staged changes. Processes that saw them must look again, so the names count as changed."""
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

    def delete(self, name: str, incarnation: int | None = None) -> int | None:
        """Decide that ``name`` is deleted. Returns the incarnation whose deletion is now under way, None when it is
        over.

        With ``incarnation`` only that one is deleted. So a request that is repeated because its answer was lost never
        deletes the topic created since: that incarnation is gone in any case. ProtocolError TOPIC_NOT_EXIST,
        NO_PERMISSION, LIMIT_EXCEEDED; with a StoreError nothing has changed. A topic that was created in the same turn
        is written first, so that undoing the creation later cannot revive it.
        """
        check_name(name)
        ending = self.deletions.endings.get(name)
        if ending is not None:
            return ending.incarnation if incarnation is None or incarnation >= ending.incarnation else None
        if self._is_lmq(name) and name not in self.table.topics:
            raise ProtocolError("NO_PERMISSION", f"{name} is an LMQ: it goes with the messages in it")
        topic = self.table.topics.get(name)
        if topic is None or (incarnation is not None and incarnation != topic.incarnation):
            if incarnation is None or incarnation > (
                self.table.version.timestamp if topic is None else topic.incarnation
            ):
                raise ProtocolError("TOPIC_NOT_EXIST", f"there is no topic {name!r}")
            return None
        if is_system(name):
            raise ProtocolError("NO_PERMISSION", f"{name} is a system topic")
        if len(self.deletions) >= self._max_deleted:
            raise ProtocolError(
                "LIMIT_EXCEEDED",
                f"the log still holds messages of {self._max_deleted} topics that were deleted (topics.max_deleted);"
                " they go with its oldest segments",
            )
        self.write()
        self.deletions.begin(name, topic.incarnation)
        self.table.remove([name])
        return topic.incarnation

    def write_deletions(self, names: Iterable[str], log_end: int) -> None:
        """Steps 3 and 4 for ``names``, which end at physical offset ``log_end``. Raises StoreError; then call it again."""
        names = list(names)
        self.deletions.bury(names, log_end)
        self._append([TopicChange(name, None, self.deletions.endings[name].incarnation) for name in names])
