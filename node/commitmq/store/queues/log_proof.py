"""Proves from the CommitLog that a queue's unit is right: see :data:`commitmq.store.queues.queue_bytes.Proof`.

A queue's files may hold stale units behind their end: RocketMQ does not zero cut units, and a power cut leaves some
pages and not others. The log has no such leftovers below its end, and a record contains its topic, queue and queue
offset. So reading the record of the last unit proves more than all units before it.

Records are read with pread instead of through a map: the records of many queues are scattered over the log, and a page
fault would read unwanted pages around each.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

from commitmq.files.fd_cache import FdCache
from commitmq.files.mapped_file import list_segments
from commitmq.format.constants import (
    BODY_SIZE_OFFSET,
    HOST_BYTES,
    HOST_V6_BYTES,
    MAGIC_V1,
    MAGIC_V2,
    SysFlag,
)
from commitmq.format.file_names import segment_name
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.queue_bytes import Proof

# Size, magic, queue id, queue offset, physical offset, sysFlag of a record (spec 2.1).
_HEAD: Final = struct.Struct(">ii4xi4xqqi")
_SEARCH_BYTES: Final = 1 << 16
_HOST_BYTES: Final = {False: HOST_BYTES, True: HOST_V6_BYTES}


def has_record_before(log: CommitLog, offset: int) -> bool:
    """Whether a record ends at physical ``offset``. At a segment's beginning, where a filler may end, that counts as
    proven.

    The record's length is unknown, so its head is searched backwards. Nearly always it is near.
    """
    base = offset - offset % log.segment_bytes
    end = offset - base
    if not end:
        return True
    segment = log.read(base, log.segment_bytes)
    magics = [struct.pack(">i", magic) for magic in (MAGIC_V1, MAGIC_V2)]
    stop = end
    while stop > 0:
        start = max(0, stop - _SEARCH_BYTES)
        # This piece contains exactly the heads that begin before ``stop``.
        piece = bytes(segment[start : min(end, stop + _HEAD.size)])
        for magic in magics:
            at = piece.rfind(magic)
            while at >= 4:
                if len(piece) - at + 4 >= _HEAD.size:
                    size, _, _, _, position, _ = _HEAD.unpack_from(piece, at - 4)
                    if (start + at - 4 + size, position) == (end, base + start + at - 4):
                        return True
                at = piece.rfind(magic, 0, at)
        stop = start
    return False


class LogProof:
    """Finds records in the log in ``folder``. Not thread-safe. Not for RocketMQ's LMQ queues, which records list as
    properties: for them it proves nothing.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        """Raises StoreError or SegmentSizeError when the log's files are damaged."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        bases = list_segments(folder, segment_bytes)
        self._min_offset = bases[0] if bases else 0
        self._fds = FdCache(64)

    def of(self, topic: str, queue_id: int) -> Proof:
        """The proof for units of one queue.

        A record that expired counts as proven: then nothing of the queue can be read any more, and the position of its
        end does not matter as long as it does not go back.
        """
        name = topic.encode()

        def is_record(queue_offset: int, physical_offset: int, size: int) -> bool:
            if physical_offset + size <= self._min_offset:
                return True
            head = self._read(physical_offset, _HEAD.size)
            if len(head) < _HEAD.size:
                return False
            found_size, magic, found_queue, found_offset, position, sys_flag = _HEAD.unpack(head)
            if (found_size, found_queue, found_offset, position) != (size, queue_id, queue_offset, physical_offset):
                return False
            if magic not in (MAGIC_V1, MAGIC_V2):
                return False
            hosts = (
                _HOST_BYTES[bool(sys_flag & SysFlag.BORN_HOST_V6)] + _HOST_BYTES[bool(sys_flag & SysFlag.STORE_HOST_V6)]
            )
            at = physical_offset + BODY_SIZE_OFFSET + hosts
            length = self._read(at, 4)
            if len(length) < 4:
                return False
            wide = magic == MAGIC_V2
            prefix = len(name).to_bytes(2 if wide else 1, "big") if len(name) < (1 << 15 if wide else 1 << 8) else b"?"
            wanted = prefix + name
            at += 4 + max(0, struct.unpack(">i", length)[0])
            return at + len(wanted) <= physical_offset + size and self._read(at, len(wanted)) == wanted

        return is_record

    def close(self) -> None:
        self._fds.close()

    def _read(self, offset: int, size: int) -> bytes:
        base = offset - offset % self._segment_bytes
        try:
            return os.pread(self._fds.read_fd(f"{self._folder}/{segment_name(base)}"), size, offset - base)
        except OSError:
            return b""
