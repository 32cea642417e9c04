"""``commitmq/position``: where the next recovery may begin; each writer of ``checkpoint`` writes it just before.

RocketMQ's checkpoint holds times, so a recovery that has only the checkpoint begins at a segment's start and reads up
to a few segments. The sidecar holds offsets, so the work after a crash is only the tail that was not flushed a second
ago.

    0    magic and version          8 bytes
    8    flushed i8                 everything below is on the device; a record's boundary
    16   flushed_timestamp i8       store time (ms) of the newest record below it
    24   queues_durable i8          every record below it has its ConsumeQueue unit, on the device
    32   crc_from i8                every record from here on has a __CRC32#; -1: records may have none
    40   segment_bytes i8           the log's segment size: with another size the offsets mean nothing
    48   owner i8                   token in ``abort`` while these positions are being written
    56   owner_before i8            token that a recovery found in ``abort``, before the owner's is there; 0 without one
    64   boot u8                    the boot of the machine (from the kernel's boot id): only when it ended can unsynced
                                    bytes be lost
    72   checkpoint_before u4       CRC-32 of the checkpoint file that existed when this was written
    76   checkpoint_after u4        CRC-32 of the checkpoint file written next
    80   crc u4                     CRC-32 of the bytes above

Trust: RocketMQ may have used the store in between. It then writes a checkpoint, so a checkpoint with neither CRC means
that the sidecar is old; and after RocketMQ was killed ``abort`` has no token of CommitMQ's
(:mod:`commitmq.store.recovery.abort_file`). In both cases RocketMQ's own rules apply (spec section 8). A sidecar that
is missing, torn or of another version counts as old.

Only a process that has finished the recovery of the store writes it, or one that was started after that.

The sidecar fits one sector and is written in place, like the checkpoint.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commitmq import failpoints
from commitmq.files.disk import overwrite
from commitmq.store.checkpoint import CHECKPOINT_BYTES, Checkpoint
from commitmq.store.log.transient_pool import boot_id
from commitmq.store.recovery.abort_file import NO_TOKEN

_MAGIC: Final = b"CMQPOS02"
_FIELDS: Final = struct.Struct(">8sqqqqqqqQII")
_CRC: Final = struct.Struct(">I")
SIDECAR_BYTES: Final = 512


@dataclass(slots=True)
class Sidecar:
    """The fields; offsets in bytes of the CommitLog. See the module's text."""

    flushed: int
    flushed_timestamp: int
    queues_durable: int
    crc_from: int
    segment_bytes: int
    owner: int
    owner_before: int = NO_TOKEN
    boot: int = 0
    checkpoint_before: int = 0
    checkpoint_after: int = 0

    @classmethod
    def load(cls, path: Path) -> Sidecar | None:
        """The content of ``path``; None when the file is missing or cannot be trusted."""
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) < _FIELDS.size + _CRC.size or data[:8] != _MAGIC:
            return None
        if zlib.crc32(data[: _FIELDS.size]) != _CRC.unpack_from(data, _FIELDS.size)[0]:
            return None
        return cls(*_FIELDS.unpack_from(data)[1:])

    def to_bytes(self) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC,
            self.flushed,
            self.flushed_timestamp,
            self.queues_durable,
            self.crc_from,
            self.segment_bytes,
            self.owner,
            self.owner_before,
            self.boot,
            self.checkpoint_before,
            self.checkpoint_after,
        )
        return (fields + _CRC.pack(zlib.crc32(fields))).ljust(SIDECAR_BYTES, b"\0")

    def agrees_with(self, checkpoint: Path, *, segment_bytes: int, previous: int | None) -> bool:
        """Whether no other program used the store since; ``previous`` is the token in ``abort``, None without that file."""
        if self.segment_bytes != segment_bytes:
            return False
        if previous is not None and (previous == NO_TOKEN or previous not in (self.owner, self.owner_before)):
            return False
        return self.has_seen(checkpoint)

    def has_seen(self, checkpoint: Path) -> bool:
        """Whether the checkpoint is one that a node wrote with this file."""
        return file_crc(checkpoint) in (self.checkpoint_before, self.checkpoint_after)

    def save_with(self, path: Path, checkpoint: Checkpoint, checkpoint_path: Path) -> None:
        """Write both files, each synced, the sidecar first: it vouches for the old checkpoint and for the new one.
        Raises OSError; then everything written so far is still right.
        """
        self.boot = this_boot()
        self.checkpoint_before = file_crc(checkpoint_path)
        self.checkpoint_after = zlib.crc32(checkpoint.to_bytes())
        overwrite(path, self.to_bytes(), "position", place="sidecar.write", before_sync="sidecar.before_fdatasync")
        if failpoints.ACTIVE:
            failpoints.hit("sidecar.before_checkpoint")
        checkpoint.save(checkpoint_path)


def file_crc(checkpoint: Path) -> int:
    """CRC-32 of a checkpoint file, of zeros without one."""
    try:
        data = checkpoint.read_bytes()
    except FileNotFoundError:
        data = b""
    return zlib.crc32(data.ljust(CHECKPOINT_BYTES, b"\0"))


def this_boot() -> int:
    """Identifies this boot of the machine; 0 where the system does not tell."""
    found = boot_id()
    return zlib.crc32(found.encode()) if found else 0
