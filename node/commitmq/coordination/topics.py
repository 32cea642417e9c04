"""The topics of a node: the rules for their names and attributes, their limits, and the staged changes.

Creations of one turn of the coordinator's loop are staged and written together by :meth:`TopicManager.write`.

Every topic that the node creates gets an *incarnation*, a number that no other topic of the store has or had (the attribute
``storage.created``, see :mod:`commitmq.store.metadata.topic_config`). It tells a request for a deleted topic, such as a late
commit or a repeated deletion, from a request for the next topic of the same name. :class:`Deletions` describes how a topic
ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from commitmq import failpoints
from commitmq.coordination.groups import Pace
from commitmq.coordination.makers import TOPIC
from commitmq.errors import InvalidMessageError, ProtocolError, StoreError
from commitmq.format.constants import DEAD_LETTER_PASSES, LMQ_PREFIX
from commitmq.log import get_log
from commitmq.semantics.trace import TRACE_TOPIC
from commitmq.semantics.transaction import DISCARD_TOPIC, HALF_TOPIC, OP_TOPIC
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.topic_config import (
    MESSAGE_TYPE,
    MESSAGE_TYPE_PRIORITY,
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
    is_send_forbidden,
    validate_topic,
)
from commitmq.store.metadata.topic_files import (
    TopicChange,
    TopicsJournal,
    TopicTurn,
    journal_path,
    load_endings,
    load_snapshot,
    load_tombstones,
    replay,
    snapshot_path,
)

MAX_QUEUES: Final = 4_096  # of one topic; an assignment of all its queues must fit a header
PERM_LIMIT: Final = 8  # RocketMQ's valid permissions are below its priority bit (spec 1.4)
MAX_SYS_FLAG: Final = (1 << 31) - 1
FILTER_TYPES: Final = ("SINGLE_TAG", "MULTI_TAG")
TRANSACTION_TOPICS: Final = (HALF_TOPIC, OP_TOPIC, DISCARD_TOPIC)
"""RocketMQ makes them when it starts; here they are made before the first transaction."""
_SYSTEM_PREFIX: Final = "rmq_sys_"
MADE_BY_CLIENTS: Final = frozenset({TRACE_TOPIC, DEAD_LETTER_PASSES})
"""System topics that a client makes, when it first needs them."""
_SYSTEM_TOPICS: Final = frozenset({"TBW102", "BenchmarkTest", *MADE_BY_CLIENTS})

# RocketMQ's attributes (spec 1.4) and one of CommitMQ, with the values that this node serves; None: any integer.
# RocketMQ loads a topics.json with an unknown attribute and keeps it: to RocketMQ, a memory topic is a topic without
# messages.
_ATTRIBUTES: Final[Mapping[str, frozenset[str] | None]] = {
    STORAGE_TYPE: frozenset({"log", STORAGE_MEMORY}),
    "queue.type": frozenset({QUEUE_TYPE_SIMPLE, QUEUE_TYPE_BATCH}),
    "cleanup.policy": frozenset({"DELETE"}),
    MESSAGE_TYPE: frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", MESSAGE_TYPE_PRIORITY}),
    "reserve.time": None,
}
# How and where a topic's messages are kept cannot change later: fixed when the topic is created, with these defaults.
FIXED_ATTRIBUTES: Final[Mapping[str, str]] = {
    STORAGE_TYPE: "log",
    QUEUE_TYPE: QUEUE_TYPE_SIMPLE,
    "cleanup.policy": "DELETE",
}
# The other attributes that a memory topic may have: plain queues of plain messages.
_KEPT_IN_MEMORY: Final[Mapping[str, tuple[str, ...]]] = {
    QUEUE_TYPE: (QUEUE_TYPE_SIMPLE,),
    MESSAGE_TYPE: ("NORMAL", "UNSPECIFIED", "FIFO"),
}


def is_system(name: str) -> bool:
    """True for topics that the node or RocketMQ made for itself: clients cannot create or delete them."""
    return is_send_forbidden(name) or name.startswith(_SYSTEM_PREFIX) or name in _SYSTEM_TOPICS


def check_name(name: str) -> None:
    """ProtocolError INVALID_PARAMETER unless ``name`` is a legal topic name."""
    try:
        validate_topic(name)
    except InvalidMessageError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error


def check_attributes(attributes: Mapping[str, str]) -> None:
    """ProtocolError INVALID_PARAMETER unless the node serves each of ``attributes``."""
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


def check_combination(attributes: Mapping[str, str]) -> None:
    """ProtocolError INVALID_PARAMETER for attributes that exclude each other."""
    if attributes.get(STORAGE_TYPE) == STORAGE_MEMORY:
        for name, kept in _KEPT_IN_MEMORY.items():
            if attributes.get(name, kept[0]) not in kept:
                raise ProtocolError("INVALID_PARAMETER", f"a memory topic cannot have {name}={attributes[name]}")


def check_fixed(topic: str, had: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """ProtocolError INVALID_PARAMETER when ``wanted`` changes an attribute that cannot change."""
    for key, default in FIXED_ATTRIBUTES.items():
        if wanted.get(key, default) != had.get(key, default):
            raise ProtocolError(
                "INVALID_PARAMETER",
                f"attribute {key} of topic {topic} is {had.get(key, default)} and cannot change;"
                " delete the topic and make it again",
            )


@dataclass(slots=True)
class TopicDeletion:
    """A decided deletion. ``version``: the TOPICS_VERSION with which other processes learn of it; 0 before that."""

    incarnation: int
    version: int = 0


class Deletions:
    """Deletes topics: a topic ends at one physical offset, agreed with the writer, and no part of it comes back.

    A deletion takes more than one file and more than one process. The steps, each durable before the next begins:

    1. The *ending*, ``{name: incarnation}`` in ``commitmq/deleting_topics.json``. From the moment the file has it the topic
       is deleted: every later failure is repaired by doing the rest again, never by restoring the topic. No topic of the
       name can be created. This holds also while the file is not yet durable, because its folder's sync failed: a process
       may have read it already, and have forgotten the topic's queue offsets. The file is written again before step 3.
    2. The other processes learn of the ending with the next TOPICS_VERSION. The processes that take sends (the writer, the
       process of memory topics) then take no more for this incarnation, forget its queue offsets, and store that version in
       their word of the control block. Only then the coordinator reads the log's end: this is where the topic ends. All its
       records lie below, because the appending processes have stopped. The records of a later incarnation will lie at or
       above, because none exists before step 6.
    3. The *tombstone*, ``{name: log's end}`` in ``commitmq/deleted_topics.json``.
    4. The topic is dropped through the topics journal (:mod:`commitmq.store.metadata.topic_files`).
    5. The groups' offsets of the topic are dropped through the offsets journal.
    6. The ending is removed. The other processes learn of the tombstone with the next TOPICS_VERSION, and the request is
       answered.

    After the death of a process:

    * The coordinator, before step 1: the topic is unchanged. Between any later two steps: its successor finds the ending,
      announces it with a version of its own, and does steps 2 to 6 again before the name can be used. All steps can be done
      twice: the tombstone only grows, while there is no newer topic that it could cover, and removing a removed topic
      changes nothing. Between step 6 and the news: the successor's version makes all processes read the files again.
      Without the ending a crash between 3 and 4 would leave a topic whose messages had vanished, and one between 4 and 5 a
      topic whose next incarnation starts with its predecessor's group offsets.
    * The writer, before it has confirmed: its successor reads the endings before it takes a send, counts none of these
      topics among its queue offsets, and confirms. Records that the predecessor had stored without publishing count as
      written by then, so they lie below the tombstone. The same holds after it has confirmed: a word that a dead process
      stored is right, because no later process can miss the ending.
    * The node, or the machine: as if all processes died. A power cut may take back records that a tombstone counts; then
      recovery lowers the tombstone to the log's new end (:mod:`commitmq.store.metadata.topic_files`).

    A writer that does not run delays step 2. The request is refused after ``topics.delete_timeout_ms``, with that reason.
    The deletion continues by itself, and the same request again waits for the same deletion.

    A tombstone can be dropped when the log holds nothing below it and the ConsumeQueue dispatcher has removed the old
    incarnation's queue files. Until then a start would take those files for the next incarnation's.

    The files of the module's text. Every writing method raises StoreError, and can then be called again.
    """

    def __init__(self, layout: StoreLayout, tombstones: dict[str, int], endings: dict[str, int]) -> None:
        """Use :meth:`load`."""
        self._layout = layout
        self.tombstones = tombstones
        self.endings = {name: TopicDeletion(incarnation) for name, incarnation in endings.items()}
        self.is_doubtful = False
        """Whether the endings file may differ from :attr:`endings`, or go with the power: a write of it failed."""
        self._untold = set(tombstones)
        self._told: dict[str, int] = {}  # the version with which other processes learn of a tombstone

    @classmethod
    def load(cls, layout: StoreLayout) -> Deletions:
        """Raises StoreError for files that cannot be read in either generation."""
        return cls(layout, load_tombstones(layout), load_endings(layout))

    def is_ending(self, name: str, incarnation: int | None = None) -> bool:
        """Whether the deletion of this incarnation of the name (None: of any) is decided and not finished."""
        found = self.endings.get(name)
        return found is not None and incarnation in (None, found.incarnation)

    def __len__(self) -> int:
        """Number of names with an ending or a tombstone."""
        return len(self.tombstones) + sum(name not in self.tombstones for name in self.endings)

    def begin(self, name: str, incarnation: int) -> None:
        """Step 1. After a StoreError the topic is not deleted. A failure that left the ending where other processes may
        read it is none: the deletion is decided, and :attr:`is_doubtful` until :meth:`settle` has made it durable.
        """
        was_doubtful = self.is_doubtful
        try:
            self._persist({**self._numbers(), name: incarnation})
        except StoreError:
            if not self._may_be_read(name):
                self.is_doubtful = was_doubtful
                raise
        if failpoints.ACTIVE:
            failpoints.hit("deletion.decided")
        self.endings[name] = TopicDeletion(incarnation)

    def _may_be_read(self, name: str) -> bool:
        """Whether a process that reads the endings now may find one of ``name``."""
        try:
            return name in load_endings(self._layout)
        except StoreError:
            return True  # another process may have better luck

    def settle(self) -> None:
        """Write the endings as they are."""
        self._persist(self._numbers())

    def _numbers(self) -> dict[str, int]:
        return {name: one.incarnation for name, one in self.endings.items()}

    def _persist(self, numbers: dict[str, int]) -> None:
        self.is_doubtful = True
        json_config.persist(self._layout.endings, numbers)
        self.is_doubtful = False

    def tell(self, version: int) -> None:
        """Other processes learn of everything decided or done so far with TOPICS_VERSION ``version``."""
        for ending in self.endings.values():
            ending.version = ending.version or version
        for name in self._untold:
            self._told[name] = version
        self._untold.clear()

    def untold(self) -> list[tuple[str, int]]:
        """``(name, incarnation)`` of the endings that are not announced yet."""
        return [(name, one.incarnation) for name, one in self.endings.items() if not one.version]

    def heard(self, version: int) -> list[str]:
        """Names of the endings that the processes that take sends have confirmed: step 2 is over for them."""
        return [name for name, one in self.endings.items() if 0 < one.version <= version]

    def bury(self, names: Iterable[str], log_end: int) -> None:
        """Step 3: the topics of ``names`` end at physical offset ``log_end``."""
        kept = dict(self.tombstones)
        for name in names:
            kept[name] = max(log_end, kept.get(name, 0))
        json_config.persist(self._layout.tombstones, kept)
        if failpoints.ACTIVE:
            failpoints.hit("deletion.buried")
        self.tombstones = kept
        self._untold.update(names)

    def finish(self, names: Iterable[str]) -> dict[str, int]:
        """Step 6. Returns the removed incarnations."""
        gone = {name: self.endings[name].incarnation for name in names}
        left = {name: incarnation for name, incarnation in self._numbers().items() if name not in gone}
        if failpoints.ACTIVE:
            failpoints.hit("deletion.before_finish")
        self._persist(left)
        if failpoints.ACTIVE:
            failpoints.hit("deletion.finished")
        for name in gone:
            del self.endings[name]
        return gone

    def prune(self, log_begin: int, carried_out: int) -> None:
        """Drop tombstones that hide no records any more; the file follows with the next :meth:`bury`.

        ``log_begin``: the log's smallest physical offset. ``carried_out``: the ConsumeQueue dispatcher has removed the
        queues of topics deleted up to this TOPICS_VERSION.
        """
        for name in [name for name, offset in self.tombstones.items() if offset <= log_begin]:
            if name not in self.endings and 0 < self._told.get(name, 0) <= carried_out:
                del self.tombstones[name], self._told[name]


_PREPARED_AT_ONCE = 1_000
_MAX_JOURNAL_BYTES = 32 * 1024 * 1024  # a start reads the whole journal
_log = get_log("coordinator")


class TopicStorage:
    """The topic table on disk: a journal of changes, and ``config/topics.json``, which follows at intervals.

    At 100,000 topics ``topics.json`` is 25 MB. See :mod:`commitmq.store.metadata.topic_files`.

    Both files of one table. A change is durable when :meth:`append` returns.
    """

    def __init__(
        self, layout: StoreLayout, table: TopicTable, journal: TopicsJournal, *, snapshot_interval_ms: int
    ) -> None:
        """Use :meth:`load`."""
        self.table = table
        self.journal = journal
        self._path = snapshot_path(layout)
        self._pace = Pace(snapshot_interval_ms)
        self._unprepared = iter(list(table.topics.items()))
        self._is_dirty = False  # the journal has changes that topics.json lacks

    @classmethod
    def load(cls, layout: StoreLayout, *, snapshot_interval_ms: int) -> TopicStorage:
        """Load a store's topics. Raises StoreError for files that cannot be read in either generation. A full disk is
        no error here: topics are served, and changes are refused until :meth:`recover` succeeds.
        """
        table, base = load_snapshot(layout)
        path = journal_path(layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        found = TopicsJournal.open(path)
        if found is None:
            try:
                journal = TopicsJournal.create(path, base)
            except StoreError as error:
                _log.error("topics cannot be changed", error=str(error))
                journal = TopicsJournal.absent(path)
        else:
            journal, content = found
            if content.torn_copy is not None:
                _log.warning("torn tail of the topics journal cut", bytes=content.torn_bytes, copy=content.torn_copy)
            if content.since(base) is None:
                sentence = "topics.json was not written by this node last: it counts, with the changes of the journal"
                _log.warning(sentence, changes=len(content.changes))
            replay(table, content, base)
            # The journal's last record may have been read from the page cache of a machine whose disk never got it, and
            # no durable record may be appended behind such a record.
            journal.failed = bool(content.changes) or content.base != base
        return cls(layout, table, journal, snapshot_interval_ms=snapshot_interval_ms)

    def try_recover(self) -> None:
        """At the end of a start: :meth:`recover` when the journal is not to be appended to. A failure is logged."""
        if self.failed and self.journal.size_bytes:
            try:
                self.recover()
            except StoreError as error:
                _log.error("topics cannot be changed", error=str(error))

    def append(self, turn: TopicTurn) -> None:
        """Make the changes of a turn durable in the journal. Raises StoreError."""
        self.journal.append([turn])
        self._is_dirty = True

    @property
    def failed(self) -> bool:
        """True while changes are refused because a write or sync failed."""
        return self.journal.failed

    def next_snapshot_ms(self) -> int | None:
        """When :meth:`snapshot` has something to do, in monotonic ms; None: not before something changes."""
        return self._pace.next_ms if self._is_dirty and not self.failed else None

    def snapshot(self, now_ms: int, *, at_once: bool = False) -> None:
        """Write ``topics.json`` if something changed and it is time, and begin a new journal. Raises StoreError. Call
        it with nothing staged: the file's content must survive a crash.
        """
        # After a start all texts have to be encoded, which would take a second at 100,000 topics: each call encodes
        # some, and the first file waits for the last of them.
        some = list(itertools.islice(self._unprepared, _PREPARED_AT_ONCE))
        self.table.prepare(some)
        is_due = (not some and self._pace.is_due(now_ms)) or self.journal.size_bytes >= _MAX_JOURNAL_BYTES
        if self._is_dirty and not self.failed and (at_once or is_due):
            self.recover()

    def recover(self) -> None:
        """Write both files again from the acknowledged state; then topics can be changed again. Raises StoreError."""
        with self._pace:
            data = json_config.encode(self.table.dumps())
            self.journal.begin_anew(json_config.name_of(data), lambda: json_config.replace_bytes(self._path, data))
        self._is_dirty = False

    def close(self) -> None:
        """Leave ``topics.json`` as RocketMQ expects it. Raises StoreError; the journal has everything."""
        try:
            if self._is_dirty or self.failed:
                self.recover()
        finally:
            self.journal.close()


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


class TopicManager:
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
    ) -> TopicManager:
        """Load a store's topics as :meth:`TopicStorage.load` does. Raises StoreError. With ``lmq`` every light message
        queue (``%LMQ%…``) is served as a readable topic of one queue, without being in the table.
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
            now = "is deleted" if topic is None else f"was recreated (incarnation {topic.incarnation})"
            raise ProtocolError("FENCED", f"topic {name} of incarnation {incarnation} {now}")

    def incarnations(self, names: Iterable[str]) -> dict[str, int]:
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
