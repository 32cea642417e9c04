"""The offsets journal: what consumer groups were told is committed, between two writings of ``consumerOffset.json``.

RocketMQ writes its offsets every five seconds and loses what came between on a crash; here an offset that was
acknowledged must survive. So every commit is first appended here and synced, and the JSON file stays what RocketMQ
reads.

File ``commitmq/offsets.journal``, integers big-endian, records back to back, the first one at byte 0::

    0   u4  magic     C3 4F 4A 01: lets the search for records behind a damage find their starts
    4   u4  length    bytes of the payload
    8   u8  sequence  0 for the first record of the file, then 1, 2, …: a record of another place is no continuation
    16  u4  CRC-32    of bytes 4..15 and the payload
    20      payload   JSON (one line)

Record 0 is ``{"base": digest}``: the fingerprint of the snapshot that the changes build on. Every further record is
the list of all changes of one turn of the coordinator's loop, ``["set", group, topic, [[queue, next offset], …]]`` or
``["drop", topic]``, in order. Changes name absolute values, so replaying them twice is the same as once.

One record a sync, and the next one is appended only after the sync of the last: so after a crash at most the last
record is incomplete, and nobody was told of it. The three outcomes of reading are

* end of log: the file ends with a complete record;
* torn tail: what follows the last good record is not a record, and no good record comes after it. It is copied to
  ``offsets.journal.torn-<ms>`` and cut;
* corruption: a good record follows the bad one, so the bad one was acknowledged. StoreError, and nothing is changed.

After a failed write or sync the file is not trusted any more (the kernel marks the pages clean although they never
reached the device): :meth:`OffsetsJournal.append` refuses until :meth:`OffsetsJournal.restart` has made a new file.
A new file is written beside the old one, synced and renamed, so at every moment one complete journal has the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from commitmq import failpoints
from commitmq.errors import DiskFullError, StoreError
from commitmq.store.json_config import sync_folder
from commitmq.store.write_all import write_all

MAGIC = b"\xc3OJ\x01"
_HEADER = struct.Struct(">4sIQI")
_CHECKED = struct.Struct(">IQ")
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
_TORN_COPIES_KEPT = 8
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SetOffsets(NamedTuple):
    """The next offsets of ``group`` in queues of ``topic``: ``(queue, next offset)`` pairs."""

    group: str
    topic: str
    offsets: tuple[tuple[int, int], ...]


class DropTopic(NamedTuple):
    """All groups forgot their offsets of ``topic``: it was deleted."""

    topic: str


Change = SetOffsets | DropTopic


class Replay(NamedTuple):
    """What :meth:`OffsetsJournal.open` found."""

    base: str
    changes: list[Change]
    torn_bytes: int  # length of the tail that was cut, 0 when the file ended well
    torn_copy: Path | None


def encode_record(sequence: int, payload: bytes) -> bytes:
    """One record of the journal. ``payload`` must not exceed MAX_PAYLOAD_BYTES (ValueError)."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a journal record of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
    crc = zlib.crc32(payload, zlib.crc32(_CHECKED.pack(len(payload), sequence)))
    return _HEADER.pack(MAGIC, len(payload), sequence, crc) + payload


def _record_at(data: bytes, position: int) -> tuple[int, bytes] | None:
    """``(sequence, payload)`` of the record at ``position``, or None when there is no whole, right one."""
    if position + _HEADER.size > len(data):
        return None
    magic, length, sequence, crc = _HEADER.unpack_from(data, position)
    start = position + _HEADER.size
    if magic != MAGIC or length > MAX_PAYLOAD_BYTES or start + length > len(data):
        return None
    payload = data[start : start + length]
    if zlib.crc32(payload, zlib.crc32(_CHECKED.pack(length, sequence))) != crc:
        return None
    return sequence, payload


def _good_record_behind(data: bytes, position: int, sequence: int) -> int | None:
    """Where a record numbered ``sequence`` or above starts at or behind ``position``, or None."""
    found = data.find(MAGIC, position)
    while found >= 0:
        record = _record_at(data, found)
        if record is not None and record[0] >= sequence:
            return found
        found = data.find(MAGIC, found + 1)
    return None


def _change_to_json(change: Change) -> list[Any]:
    if isinstance(change, DropTopic):
        return ["drop", change.topic]
    return ["set", change.group, change.topic, change.offsets]


def _change_from_json(entry: Any) -> Change:
    match entry:
        case ["drop", str(topic)]:
            return DropTopic(topic)
        case ["set", str(group), str(topic), list(pairs)]:
            return SetOffsets(group, topic, tuple((int(queue), int(offset)) for queue, offset in pairs))
    raise ValueError(f"unknown change {entry!r}")


def store_error(error: OSError, what: str, path: Path) -> StoreError:
    """The typed error for a failed system call on ``path``: DiskFullError when space, quota or file size ran out."""
    kind = DiskFullError if error.errno in _NO_SPACE else StoreError
    return kind(f"{what}: {error.strerror}", path=path)


class OffsetsJournal:
    """The open journal; one process has it."""

    def __init__(self, path: Path, fd: int, size_bytes: int, sequence: int) -> None:
        """Use :meth:`create` or :meth:`open`. ``sequence`` is the number of the next record."""
        self.path = path
        self._fd = fd
        self.size_bytes = size_bytes
        self._sequence = sequence
        self.failed = False  # a write or sync failed: nothing may be appended before a restart

    @classmethod
    def create(cls, path: Path, base: str) -> OffsetsJournal:
        """A durable journal without changes on the snapshot named ``base``, in place of what has the name."""
        fd, size_bytes = cls._new_file(path, base)
        try:
            os.replace(path.with_name(path.name + ".new"), path)
            sync_folder(path.parent)
        except OSError as error:
            os.close(fd)
            raise store_error(error, "cannot make the offsets journal", path) from error
        return cls(path, fd, size_bytes, 1)

    @classmethod
    def absent(cls, path: Path) -> OffsetsJournal:
        """A journal that could not be made (the disk is full): it refuses to append until :meth:`restart` succeeds."""
        journal = cls(path, -1, 0, 1)
        journal.failed = True
        return journal

    @classmethod
    def open(cls, path: Path) -> tuple[OffsetsJournal, Replay] | None:
        """The journal at ``path`` and its content, with a torn tail cut; None when there is no such file.

        Raises StoreError when an acknowledged record is damaged (its offset is named) or the file is no journal.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            with open(fd, "rb", closefd=False) as file:
                data = file.read()
            base, changes, end, sequence = cls._parse(path, data)
            copy = None
            if end < len(data):
                copy = cls._keep_torn(path, data[end:])
                os.ftruncate(fd, end)
                os.fdatasync(fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, end, sequence), Replay(base, changes, len(data) - end, copy)

    @staticmethod
    def _parse(path: Path, data: bytes) -> tuple[str, list[Change], int, int]:
        base: str | None = None
        changes: list[Change] = []
        position = sequence = 0
        while (record := _record_at(data, position)) is not None and record[0] == sequence:
            try:
                content = orjson.loads(record[1])
                if base is None:
                    base = str(content["base"])
                else:
                    changes += map(_change_from_json, content)
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(
                    f"the offsets journal has a record of an unknown kind: {error}", path=path, offset=position
                ) from error
            position += _HEADER.size + len(record[1])
            sequence += 1
        if position < len(data):
            later = _good_record_behind(data, position, sequence)
            if later is not None:
                raise StoreError(
                    f"the offsets journal is damaged: record {sequence} is not readable, but a good one follows at "
                    f"offset {later}. Restore the file from a copy, or move it away to go on with consumerOffset.json",
                    path=path,
                    offset=position,
                )
        if base is None:
            # A journal gets its name only when its first record is durable, so this is no crash of ours.
            raise StoreError("not an offsets journal: its first record is missing or damaged", path=path, offset=0)
        return base, changes, position, sequence

    @staticmethod
    def _keep_torn(path: Path, tail: bytes) -> Path:
        copy = path.with_name(f"{path.name}.torn-{time.time_ns() // 1_000_000}")
        with open(copy, "wb") as file:
            file.write(tail)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
        for old in sorted(path.parent.glob(f"{path.name}.torn-*"))[:-_TORN_COPIES_KEPT]:
            old.unlink()
        return copy

    @staticmethod
    def _new_file(path: Path, base: str) -> tuple[int, int]:
        """A synced journal without changes under ``<path>.new``; returns its descriptor and size."""
        new = path.with_name(path.name + ".new")
        record = encode_record(0, orjson.dumps({"base": base}))
        fd = -1
        try:
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            write_all(fd, record, 0, place="journal.create")
            os.fdatasync(fd)
            if failpoints.ACTIVE:
                failpoints.hit("journal.after_create")
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(OSError):
                new.unlink()
            raise store_error(error, "cannot make the offsets journal", path) from error
        return fd, len(record)

    def append(self, changes: Sequence[Change]) -> None:
        """Append ``changes`` as one record; on return they survive a power cut.

        Raises StoreError (DiskFullError when space is the reason): then nothing may be acknowledged, and every further
        append is refused until :meth:`restart` succeeds.
        """
        if self.failed:
            raise StoreError("the offsets journal could not be written before and was not replaced yet", path=self.path)
        record = encode_record(self._sequence, orjson.dumps([_change_to_json(change) for change in changes]))
        try:
            written = 0
            while written < len(record):
                # A short write is how a disk about to be full shows itself; the next call then says why.
                rest = memoryview(record)[written:]
                if failpoints.ACTIVE:
                    rest = failpoints.clip("journal.append", rest)
                written += os.pwrite(self._fd, rest, self.size_bytes + written)
            if failpoints.ACTIVE:
                failpoints.hit("journal.before_fdatasync")
            os.fdatasync(self._fd)
            if failpoints.ACTIVE:
                failpoints.hit("journal.after_fdatasync")
        except OSError as error:
            self.failed = True
            with contextlib.suppress(OSError):
                # Only tidiness: what was refused need not be replayed. A record that stays is a value that its
                # consumer had asked for, and the file is replaced before anything else is acknowledged.
                os.ftruncate(self._fd, self.size_bytes)
            raise store_error(error, "cannot write the offsets journal", self.path) from error
        self.size_bytes += len(record)
        self._sequence += 1

    def restart(self, base: str) -> None:
        """Replace the file by an empty journal on snapshot ``base``, which must be durable already.

        Raises StoreError; the journal then stays as it was, or is ``failed`` when the rename's fate is unknown.
        """
        fd, size_bytes = self._new_file(self.path, base)
        try:
            os.replace(self.path.with_name(self.path.name + ".new"), self.path)
        except OSError as error:
            os.close(fd)
            raise store_error(error, "cannot replace the offsets journal", self.path) from error
        self.close()
        self._fd, self.size_bytes, self._sequence = fd, size_bytes, 1
        try:
            sync_folder(self.path.parent)
        except OSError as error:
            # Whether a power cut brings the old file back is unknown; both are right for now, but an append is not.
            self.failed = True
            raise store_error(error, "cannot replace the offsets journal", self.path) from error
        self.failed = False

    def close(self) -> None:
        """Close the descriptor; what was appended is durable already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
