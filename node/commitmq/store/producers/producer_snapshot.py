"""``commitmq/producers``: a snapshot of the table of idempotent producers at a place of the log.

    0    magic and version     8 bytes
    8    position i8           physical offset up to which the table covers the log; a record's boundary
    16   length i8             bytes of the table
    24   crc u4                CRC-32 of the 24 bytes above and of the table
    28   the table             see ProducerTable.to_bytes

This file and the records behind ``position`` give the table of any later moment, so a start need not read the whole
log. Two rules make it right after any crash:

* It is written only once everything below ``position`` is flushed. So it never covers a record that a power cut could
  take away; a recovery never cuts flushed records. If it did after all (a person repaired the log), the log shows it:
  it ends below ``position``, has no record that ends there, or not the newest record that the table knows. Then the
  table is made from the whole log, which takes long but is right.
* The recovery that takes a store over, RocketMQ's or a new one, makes the first snapshot, of no producers at the log's
  end. A store was taken over when it has ``commitmq/store.json``, which is written after that. If the snapshot is
  missing afterwards, or is damaged, there may be producers, and the whole log is read.

It is written to a new file, synced and renamed: a complete one always exists.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.store.layout import StoreLayout

_MAGIC: Final = b"CMQPRD01"
_HEAD: Final = struct.Struct(">8sqq")
_CRC: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class ProducerSnapshot:
    """The file's content. ``table`` is the result of ProducerTable.to_bytes."""

    position: int
    table: bytes

    @classmethod
    def load(cls, path: Path) -> ProducerSnapshot | None:
        """The content of ``path``; None without a file. Raises StoreError when it is damaged."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise StoreError("a folder is in the place of the snapshot of producers", path=path) from error
        start = _HEAD.size + _CRC.size
        if len(data) < start or data[:8] != _MAGIC:
            raise StoreError("this is no snapshot of producers", path=path, offset=0)
        _, position, length = _HEAD.unpack_from(data)
        table = data[start:]
        if len(table) != length or zlib.crc32(table, zlib.crc32(data[: _HEAD.size])) != _CRC.unpack_from(data, 24)[0]:
            raise StoreError("the snapshot of producers is damaged", path=path, offset=24)
        return cls(position, table)

    def save(self, path: Path) -> None:
        """Replace the file, durably. Raises OSError; then the old one is still there."""
        head = _HEAD.pack(_MAGIC, self.position, len(self.table))
        data = head + _CRC.pack(zlib.crc32(self.table, zlib.crc32(head))) + self.table
        atomic_file.make_way(path)
        atomic_file.replace(path, data, "producers")


def may_have_producers(layout: StoreLayout) -> bool:
    """Whether a node has ever served the store: if so, a missing snapshot was lost."""
    return layout.producers.exists() or layout.store_file.exists()
