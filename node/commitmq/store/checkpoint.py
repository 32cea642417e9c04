"""``checkpoint``: the store times up to which CommitLog, ConsumeQueues and index were durable when it was written (spec
1.6).

0    physicMsgTimestamp i8     store time of the newest record known flushed
8    logicsMsgTimestamp i8     store time of the newest record known in a ConsumeQueue
16   indexMsgTimestamp i8      end time of the newest full index file
24   masterFlushedOffset i8    on a replica: the offset that its master reported
32   confirmPhyOffset i8       set by recovery: start of the last valid record
40   zeros up to 4096 bytes    kept as read: another version may use them
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import overwrite

CHECKPOINT_BYTES: Final = 4096
_FIELDS: Final = struct.Struct(">qqqqq")
_SAFETY_MS: Final = 3_000


@dataclass(slots=True)
class Checkpoint:
    """The fields; time stamps in ms, offsets in bytes of the CommitLog."""

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_physical_offset: int = 0
    rest: bytes = b""

    @property
    def min_timestamp(self) -> int:
        """Time at which a recovery may begin (ms): everything stored 3 s before it is in the log and the ConsumeQueues."""
        return max(0, min(self.physic_msg_timestamp, self.logics_msg_timestamp) - _SAFETY_MS)

    @property
    def min_timestamp_index(self) -> int:
        """The same, if index files must be complete too."""
        return min(self.min_timestamp, self.index_msg_timestamp)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """The checkpoint at ``path``; all zero without a file. Raises StoreError when it is shorter than its fields."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise StoreError(f"cannot read the checkpoint: {error.strerror}", path=path) from error
        if not data:  # created, but never written
            return cls()
        if len(data) < _FIELDS.size:
            raise StoreError(f"a checkpoint has {CHECKPOINT_BYTES} bytes, this one {len(data)}", path=path)
        physic, logics, index, master, confirm = _FIELDS.unpack_from(data)
        return cls(physic, logics, index, master, confirm, data[_FIELDS.size :].rstrip(b"\0"))

    @classmethod
    def load_durable(cls, path: Path) -> Checkpoint:
        """:meth:`load`, then sync, so that the result is on the device: its writer may have died before the sync."""
        found = cls.load(path)
        try:
            fd = disk.open_file(path, os.O_RDWR, "checkpoint")
        except FileNotFoundError:
            return found
        try:
            disk.sync(fd, "checkpoint")
            disk.sync_folder(path.parent, "checkpoint")
        except OSError as error:
            raise StoreError(f"cannot sync the checkpoint: {error.strerror}", path=path) from error
        finally:
            os.close(fd)
        return found

    def to_bytes(self) -> bytes:
        """The 4096 bytes of the file."""
        fields = _FIELDS.pack(
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_physical_offset,
        )
        return (fields + self.rest).ljust(CHECKPOINT_BYTES, b"\0")

    def save(self, path: Path) -> None:
        """Write the file in place and sync it. The fields share one sector. Raises OSError; the caller knows whether an
        old checkpoint does harm (it only makes a recovery start earlier).
        """
        points = {"place": "checkpoint.write", "before_sync": "checkpoint.before_fdatasync"}
        overwrite(path, self.to_bytes(), "checkpoint", **points)
