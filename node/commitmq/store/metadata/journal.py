"""A journal beside one of RocketMQ's JSON files: every change since the file was last written whole.

RocketMQ writes its tables whole, and a crash loses the changes since. Here acknowledged changes must survive, and the
cost of a change must not grow with the table. So every change is first appended to the journal and synced; the JSON
file, the *snapshot*, stays the file that RocketMQ reads.

Integers are big-endian, records back to back, the first one at byte 0::

    0   u4  magic     C3 4F 4A 01: by it the search behind a damage finds the starts of records
    4   u4  length    bytes of the payload
    8   u8  sequence  0 for the first record of the file, then 1, 2, …: a record from elsewhere does not continue it
    16  u4  CRC-32    of bytes 4..15 and the payload
    20      payload   JSON (one line)

Record 0 is an object; its ``base`` names the snapshot that the changes build on. Every further record either has all
changes of one turn of the coordinator's loop, in the encoding of the journal's kind, or is a *mark*, ``{"snapshot":
name}``: the snapshot of this name has all changes of the records before it. Changes name absolute values, so replaying
them twice is the same as once.

Each sync covers one record, and the next record is appended only after the sync of the last. So after a crash at most
the last record is incomplete, and it was never acknowledged. Reading has three outcomes:

* end of log: the file ends with a complete record;
* torn tail: the bytes behind the last good record are not a record, and no good record comes after them. They are
  copied to ``<name>.torn-<ms>`` and cut;
* corruption: a good record follows the bad one, so the bad one was acknowledged. StoreError; nothing is changed.

A new snapshot (:meth:`Journal.begin_anew`) takes three steps. If a process dies, or a call fails, between two of them,
the existing files give the same state:

1. The mark is appended. The old snapshot with all records is still right.
2. The snapshot is written under its name, durably. Now both are right: the old one with all records, the new one with
   the records behind its mark.
3. A journal without changes replaces the old one. Until that succeeds the old journal, which has the mark, is used.

After a failed write or sync the file is no longer trusted (the kernel marks the pages clean although they never reached
the device): :meth:`Journal.append` refuses until :meth:`Journal.begin_anew` has made a new file; step 1 is then
omitted, and nothing can be acknowledged between 2 and 3. A new file is written beside the old one, synced and renamed,
so at every moment one complete journal has the name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import orjson

from commitmq import failpoints
from commitmq.errors import InvalidMessageError, StoreError
from commitmq.files import atomic_file, disk
from commitmq.files.disk import write_all
from commitmq.files.disk_space import is_no_space, kind_of
from commitmq.semantics.pop import OrderState, table_from_json
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config

MAGIC = b"\xc3OJ\x01"
_HEADER = struct.Struct(">4sIQI")
HEADER_BYTES = _HEADER.size
_CHECKED = struct.Struct(">IQ")
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
_TORN_COPIES_KEPT = 8

C = TypeVar("C")  # one change


class Replay(NamedTuple, Generic[C]):
    """The content of a journal. ``turns`` are its records, each with the changes of one turn."""

    base: str
    turns: list[list[C]]
    marks: dict[str, int]  # name of a snapshot -> number of turns that it includes
    head: Mapping[str, Any]
    torn_bytes: int  # length of the tail that was cut, 0 when the file ended with a complete record
    torn_copy: Path | None

    @property
    def changes(self) -> list[C]:
        return [change for turn in self.turns for change in turn]

    def since(self, snapshot: str) -> list[C] | None:
        """The changes that the snapshot of this name lacks; None when the journal does not know the snapshot."""
        done = 0 if snapshot == self.base else self.marks.get(snapshot)
        return None if done is None else [change for turn in self.turns[done:] for change in turn]


def encode_record(sequence: int, payload: bytes) -> bytes:
    """One record of the journal. ``payload`` must not exceed MAX_PAYLOAD_BYTES (ValueError)."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a journal record of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
    crc = zlib.crc32(payload, zlib.crc32(_CHECKED.pack(len(payload), sequence)))
    return _HEADER.pack(MAGIC, len(payload), sequence, crc) + payload


def record_at(data: bytes, position: int) -> tuple[int, bytes] | None:
    """``(sequence, payload)`` of the record at ``position``, or None when there is no complete, valid one."""
    if position + HEADER_BYTES > len(data):
        return None
    magic, length, sequence, crc = _HEADER.unpack_from(data, position)
    start = position + HEADER_BYTES
    if magic != MAGIC or length > MAX_PAYLOAD_BYTES or start + length > len(data):
        return None
    payload = data[start : start + length]
    if zlib.crc32(payload, zlib.crc32(_CHECKED.pack(length, sequence))) != crc:
        return None
    return sequence, payload


def _good_record_behind(data: bytes, position: int, sequence: int) -> int | None:
    """Position at or behind ``position`` of a record numbered ``sequence`` or above, or None."""
    found = data.find(MAGIC, position)
    while found >= 0:
        record = record_at(data, found)
        if record is not None and record[0] >= sequence:
            return found
        found = data.find(MAGIC, found + 1)
    return None


def store_error(error: OSError, what: str, path: Path) -> StoreError:
    """The typed error for a failed system call on ``path``: DiskFullError when space, quota or file size ran out."""
    kind = kind_of(error)
    return kind(f"{what}: {error.strerror}", path=path)


class Journal(ABC, Generic[C]):
    """The open journal; only one process has it. Subclasses define its name and the encoding of its changes."""

    kind: ClassVar[str] = "journal"  # its name in messages
    place: ClassVar[str] = "journal"  # first word of its failpoints
    snapshot_name: ClassVar[str] = "its snapshot"

    @classmethod
    @abstractmethod
    def encode(cls, changes: Sequence[C]) -> list[Any]:
        """The payload of a record: a JSON list."""

    @classmethod
    @abstractmethod
    def decode(cls, payload: list[Any]) -> list[C]:
        """Inverse of :meth:`encode`. Raises ValueError, KeyError or TypeError for anything else."""

    def __init__(self, path: Path, fd: int, size_bytes: int, sequence: int, file_id: str = "") -> None:
        """Use :meth:`create` or :meth:`open`. ``sequence`` is the number of the next record."""
        self.path = path
        self._fd = fd
        self.size_bytes = size_bytes
        self._sequence = sequence
        self._file_id = file_id
        self.failed = False  # a write or sync failed: nothing may be appended before there is a new file

    @classmethod
    def create(cls, path: Path, base: str) -> Self:
        """Make a durable journal without changes on the snapshot named ``base``; replaces a file of this name."""
        fd, size_bytes, file_id = cls._new_file(path, base, None, {})
        try:
            atomic_file.take_name(path, "journal")
            disk.sync_folder(path.parent, "journal")
        except OSError as error:
            os.close(fd)
            raise store_error(error, f"cannot make the {cls.kind}", path) from error
        return cls(path, fd, size_bytes, 1, file_id)

    @classmethod
    def absent(cls, path: Path) -> Self:
        """A journal that could not be made (the disk is full): it refuses to append until there is a file."""
        journal = cls(path, -1, 0, 1)
        journal.failed = True
        return journal

    @classmethod
    def open(cls, path: Path) -> tuple[Self, Replay[C]] | None:
        """The journal at ``path`` and its content, with a torn tail cut; None when the file does not exist. Raises
        StoreError when an acknowledged record is damaged (the error names its offset) or the file is not a journal.
        """
        try:
            fd = disk.open_file(path, os.O_RDWR, "journal")
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise cls._is_folder(path) from error
        try:
            with open(fd, "rb", closefd=False) as file:
                data = file.read()
            replay, end, sequence = cls._parse(path, data)
            if end < len(data):
                replay = replay._replace(torn_bytes=len(data) - end, torn_copy=cls._keep_torn(path, data[end:]))
                disk.resize(fd, end, "journal")
                disk.sync(fd, "journal")
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, end, sequence, str(replay.head.get("id", ""))), replay

    @classmethod
    def read(cls, path: Path) -> Replay[C] | None:
        """The content of the journal at ``path``, which another process may own; changes nothing. See :meth:`open`."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise cls._is_folder(path) from error
        return cls._parse(path, data)[0]

    @classmethod
    def _is_folder(cls, path: Path) -> StoreError:
        return StoreError(f"a folder is in the place of the {cls.kind}. To continue, {cls._way_out()}", path=path)

    @classmethod
    def _parse(cls, path: Path, data: bytes) -> tuple[Replay[C], int, int]:
        head: dict[str, Any] | None = None
        turns: list[list[C]] = []
        marks: dict[str, int] = {}
        position = sequence = 0
        while (record := record_at(data, position)) is not None and record[0] == sequence:
            try:
                content = orjson.loads(record[1])
                if head is None:
                    head = {**content, "base": str(content["base"])}
                elif isinstance(content, dict):
                    marks[str(content["snapshot"])] = len(turns)
                else:
                    turns.append(cls.decode(content))
            except (ValueError, KeyError, TypeError) as error:
                sentence = (
                    f"the {cls.kind} has a record that this version does not know: {error}. Use the version that wrote "
                    f"it. Or {cls._way_out()}"
                )
                raise StoreError(sentence, path=path, offset=position) from error
            position += HEADER_BYTES + len(record[1])
            sequence += 1
        if position < len(data):
            later = _good_record_behind(data, position, sequence)
            if later is not None:
                sentence = (
                    f"the {cls.kind} is damaged: record {sequence} is not readable, but a good one follows at "
                    f"offset {later}. To continue, {cls._way_out()}"
                )
                raise StoreError(sentence, path=path, offset=position)
        if head is None:
            # A journal gets its name only when its first record is durable, so no crash of a node leaves this.
            sentence = f"this is no {cls.kind}: its first record is missing or damaged. To continue, {cls._way_out()}"
            raise StoreError(sentence, path=path, offset=0)
        return Replay(head["base"], turns, marks, head, 0, None), position, sequence

    @classmethod
    def _way_out(cls) -> str:
        return (
            f"put back a copy of the file; or move it away to continue with {cls.snapshot_name}, and without the changes "
            "that only the journal has"
        )

    @staticmethod
    def _keep_torn(path: Path, tail: bytes) -> Path:
        copy = path.with_name(f"{path.name}.torn-{time.time_ns() // 1_000_000}")
        with disk.opened(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "journal") as fd:
            write_all(fd, tail, 0)
            disk.sync(fd, "journal")
        disk.sync_folder(path.parent, "journal")
        for old in sorted(path.parent.glob(f"{path.name}.torn-*"))[:-_TORN_COPIES_KEPT]:
            old.unlink()
        return copy

    @classmethod
    def _new_file(
        cls, path: Path, base: str, continues: dict[str, Any] | None, more: Mapping[str, Any]
    ) -> tuple[int, int, str]:
        """A synced journal without changes under the temporary name; returns its descriptor, size and id."""
        file_id = secrets.token_hex(8)
        head = {**more, "base": base, "id": file_id, **({"continues": continues} if continues else {})}
        record = encode_record(0, orjson.dumps(head))
        try:
            fd = atomic_file.write_beside(path, record, "journal")
        except OSError as error:
            raise store_error(error, f"cannot make the {cls.kind}", path) from error
        return fd, len(record), file_id

    def append(self, changes: Sequence[C]) -> None:
        """Append ``changes`` as one record; when this returns they survive a power cut.

        Raises StoreError: then nothing may be acknowledged, and every further append is refused until :meth:`begin_anew`
        succeeds. DiskFullError for lack of space: the same call may be repeated, unless the journal has :attr:`failed`.
        """
        self._append(self.encode(changes))

    def _append(self, payload: Any) -> None:
        if self.failed:
            raise StoreError(f"the {self.kind} could not be written before and was not replaced yet", path=self.path)
        record = encode_record(self._sequence, orjson.dumps(payload))
        is_syncing = False
        try:
            # A disk about to be full shows itself by a short write; the next call then returns the error.
            write_all(self._fd, record, self.size_bytes, place=f"{self.place}.append")
            is_syncing = True
            if failpoints.ACTIVE:
                failpoints.hit(f"{self.place}.before_fdatasync")
            disk.sync(self._fd, "journal")
            if failpoints.ACTIVE:
                failpoints.hit(f"{self.place}.after_fdatasync")
        except OSError as error:
            self.failed = True
            with contextlib.suppress(OSError):
                # The cut is only tidiness: a refused record need not be replayed. A record that stays is a value that
                # its consumer had asked for, and the file is replaced before anything else is acknowledged.
                disk.resize(self._fd, self.size_bytes, "journal")
                # Without room nothing was synced, so nothing of what is there was lost: it continues when there is
                # room.
                self.failed = is_syncing or not is_no_space(error)
            raise store_error(error, f"cannot write the {self.kind}", self.path) from error
        self.size_bytes += len(record)
        self._sequence += 1

    def begin_anew(self, snapshot: str, write: Callable[[], None], more: Mapping[str, Any] | None = None) -> None:
        """``write`` a snapshot of everything appended, which gets the name ``snapshot``, and empty the journal. ``more``
        goes into its head: what the snapshot cannot have.

        Raises StoreError at any of the steps: nothing that was appended is lost, and :attr:`failed` says whether
        appending can continue. A ``failed`` journal is usable again when this returns.
        """
        if not self.failed:
            self._append({"snapshot": snapshot})
        write()
        if failpoints.ACTIVE:
            failpoints.hit(f"{self.place}.after_snapshot")
        continues = {"id": self._file_id, "records": self._sequence} if self._file_id else None
        fd, size_bytes, file_id = self._new_file(self.path, snapshot, continues, more or {})
        try:
            atomic_file.take_name(self.path, "journal")
        except OSError as error:
            os.close(fd)
            # The error may have arrived although the new file has the name. What were appended to the old one then would
            # be in no file.
            self.failed = self.failed or not self._has_its_name()
            raise store_error(error, f"cannot replace the {self.kind}", self.path) from error
        self.close()
        self._fd, self.size_bytes, self._sequence, self._file_id = fd, size_bytes, 1, file_id
        try:
            disk.sync_folder(self.path.parent, "journal")
        except OSError as error:
            # A power cut may bring the old file back; both are right for now, but an append would be in only one of
            # them.
            self.failed = True
            raise store_error(error, f"cannot replace the {self.kind}", self.path) from error
        self.failed = False

    def _has_its_name(self) -> bool:
        try:
            there, here = os.stat(self.path), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Close the descriptor; everything appended is already durable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SetOffsets(NamedTuple):
    """The next offsets of ``group`` in queues of ``topic``: ``(queue, next offset)`` pairs."""

    group: str
    topic: str
    offsets: tuple[tuple[int, int], ...]


class DropTopic(NamedTuple):
    """All groups forgot their offsets of ``topic``: it was deleted."""

    topic: str


class DropGroup(NamedTuple):
    """The group forgot all its offsets: it was deleted with them."""

    group: str


Change = SetOffsets | DropTopic | DropGroup


class OffsetsJournal(Journal[Change]):
    """The offsets journal: the group commits acknowledged between two writings of ``consumerOffset.json``.

    File ``commitmq/offsets.journal``, a :mod:`commitmq.store.metadata.journal`. A record is the list of all changes of one
    turn of the coordinator's loop, ``["set", group, topic, [[queue, next offset], …]]``, ``["drop", topic]`` or ``["forget",
    group]``, in order.
    """

    kind = "offsets journal"
    place = "journal"
    snapshot_name = "consumerOffset.json"

    @classmethod
    def encode(cls, changes: Sequence[Change]) -> list[Any]:
        return [_offsets_json(change) for change in changes]

    @classmethod
    def decode(cls, payload: list[Any]) -> list[Change]:
        return [_offsets_from_json(entry) for entry in payload]


def _offsets_json(change: Change) -> list[Any]:
    match change:
        case DropTopic(topic):
            return ["drop", topic]
        case DropGroup(group):
            return ["forget", group]
        case SetOffsets(group, topic, offsets):
            return ["set", group, topic, offsets]


def _offsets_from_json(entry: Any) -> Change:
    match entry:
        case ["drop", str(topic)]:
            return DropTopic(topic)
        case ["forget", str(group)]:
            return DropGroup(group)
        case ["set", str(group), str(topic), list(pairs)]:
            return SetOffsets(group, topic, tuple((int(queue), int(offset)) for queue, offset in pairs))
    raise ValueError(f"unknown change {entry!r}")


States = dict[tuple[str, str], dict[int, OrderState]]
"""(topic, group) and queue."""


class OrderChange(NamedTuple):
    """The new state of a queue in a group; None for none."""

    topic: str
    group: str
    queue: int
    state: OrderState | None


class TopicSeen(NamedTuple):
    """The states of ``topic`` are those of the topic with this incarnation."""

    topic: str
    incarnation: int


class OrdersJournal(Journal[OrderChange | TopicSeen]):
    """The states of ordered receives in their files: RocketMQ's ``config/consumerOrderInfo.json``, and a journal of the
    changes since.

    RocketMQ keeps the states in memory and writes the file at intervals, so a death of its broker loses the last ones.
    Here a state is durable before the answer that depends on it. Written whole for each turn, the file would cost what
    the table has, and not what changes. So each turn appends its changes to ``commitmq/orders.journal``, a
    :mod:`commitmq.store.metadata.journal`, and the file follows at intervals and at a stop. A record is a list of
    ``["put", topic, group, queue, {state}]``, ``["drop", topic, group, queue]`` and ``["topic", topic, incarnation]``.
    The last one says of which topic of that name the states are: RocketMQ's file does not, and a state of a deleted
    topic would acknowledge messages of the next one. The head of the journal has the same of all topics at the time of
    the snapshot.

    A file that the journal does not know is RocketMQ's, which used the store after a crash. Then of both states of a
    queue that of the later receive counts, and of the same receive RocketMQ's, with the messages that either of them
    has as acked, or as returned untried. A state that only one of them has counts too: at worst it blocks its queue
    until its time is over.
    """

    kind = "journal of ordered receives"
    place = "orders"
    snapshot_name = "consumerOrderInfo.json"

    @classmethod
    def encode(cls, changes: Sequence[OrderChange | TopicSeen]) -> list[Any]:
        return [_orders_json(change) for change in changes]

    @classmethod
    def decode(cls, payload: list[Any]) -> list[OrderChange | TopicSeen]:
        return [_orders_from_json(entry) for entry in payload]


def _orders_json(change: OrderChange | TopicSeen) -> list[Any]:
    if isinstance(change, TopicSeen):
        return ["topic", *change]
    place = [change.topic, change.group, change.queue]
    if change.state is None:
        return ["drop", *place]
    values = change.state.to_json()
    for name in ("oc", "ot"):  # standard JSON has no keys that are integers
        if name in values:
            values[name] = {str(offset): number for offset, number in values[name].items()}
    return ["put", *place, values]


def _orders_from_json(entry: Any) -> OrderChange | TopicSeen:
    try:
        match entry:
            case ["topic", str(topic), int(incarnation)]:
                return TopicSeen(topic, incarnation)
            case ["drop", str(topic), str(group), int(queue)]:
                return OrderChange(topic, group, queue, None)
            case ["put", str(topic), str(group), int(queue), dict(values)]:
                return OrderChange(topic, group, queue, OrderState.from_json(values))
    except InvalidMessageError as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"unknown change {entry!r}")


def journal_path(layout: StoreLayout) -> Path:
    return layout.own / "orders.journal"


def snapshot_path(layout: StoreLayout) -> Path:
    return layout.config / "consumerOrderInfo.json"


def load_snapshot(layout: StoreLayout) -> tuple[States, str]:
    """``consumerOrderInfo.json`` or its ``.bak``, and its name; an empty table when neither exists. Raises StoreError,
    or InvalidMessageError for a file with something else in it.
    """
    content, name = json_config.load_named(snapshot_path(layout))
    return ({} if content is None else table_from_json(content)), name


Content = Replay[OrderChange | TopicSeen]


def incarnations(journal: Content, snapshot: str) -> dict[str, int]:
    """Of which topics the states are, by name; nothing is known beside a ``snapshot`` that the journal does not know."""
    if journal.since(snapshot) is None:
        return {}
    first = journal.head.get("topics")
    found = {str(name): int(one) for name, one in first.items()} if isinstance(first, dict) else {}
    return found | {one.topic: one.incarnation for one in journal.changes if isinstance(one, TopicSeen)}


def replay(table: States, journal: Content, snapshot: str) -> None:
    """Merge the journal into ``table``, a snapshot of this name, by the module's rules."""
    since = journal.since(snapshot)
    # Changes name whole states, so of each queue the last one counts.
    last = {
        (change.topic, change.group, change.queue): change
        for change in (journal.changes if since is None else since)
        if isinstance(change, OrderChange)
    }
    for change in last.values():
        states = table.setdefault((change.topic, change.group), {})
        if change.state is not None:
            states[change.queue] = change.state if since is not None else _later(states.get(change.queue), change.state)
        elif since is not None:
            states.pop(change.queue, None)


def _later(there: OrderState | None, ours: OrderState) -> OrderState:
    """Which of two states of one queue counts."""
    if there is None or ours.pop_time > there.pop_time:
        return ours
    if ours.pop_time == there.pop_time and ours.offsets == there.offsets:
        return replace(there, acked_bits=there.acked_bits | ours.acked_bits, untried=there.untried | ours.untried)
    return there


def read(layout: StoreLayout) -> States:
    """All states of a store, which a node may be using; changes nothing. Raises as :func:`load_snapshot`."""
    table, name = load_snapshot(layout)
    journal = OrdersJournal.read(journal_path(layout))
    if journal is not None:
        replay(table, journal, name)
    return {names: states for names, states in table.items() if states}
