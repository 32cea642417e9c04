"""``commitmq/producers``: the table of idempotent producers as it was at a place of the log.

    0    magic and version     8 bytes
    8    position i8           physical offset up to which the table knows the log; a record's boundary
    16   length i8             bytes of the table
    24   crc u4                CRC-32 of the 24 bytes above and of the table
    28   the table             see ProducerTable.to_bytes

With it and the records behind ``position`` the table of any later moment can be made, so a start need not read the whole
log. Two rules make it right after any crash:

* It is written only once everything below ``position`` is flushed. So it never claims a record that a power cut could take
  away; a recovery never cuts what was flushed. Where it did after all (a person repaired the log), the log says so: it ends
  below ``position``, has no record that ends there, or not the newest one that the table knows. Then the table is made from
  the whole log, which takes long but is right.
* The recovery that takes a store over, RocketMQ's or a new one, makes the first one, of no producers at the log's end. A store
  was taken over when it has ``commitmq/store.json``, which is written behind that. Where the file is missing afterwards, or
  is damaged, there may be producers, and the log is read as a whole.

Written to a new file, synced, renamed: there is always a whole one.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.store.layout import StoreLayout

_MAGIC: Final = b"CMQPRD01"
_HEAD: Final = struct.Struct(">8sqq")
_CRC: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class ProducerSnapshot:
    """The file's content. ``table`` is what ProducerTable.to_bytes gave."""

    position: int
    table: bytes

    @classmethod
    def load(cls, path: Path) -> ProducerSnapshot | None:
        """What is in ``path``; None when there is no such file. Raises StoreError when it is damaged."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        start = _HEAD.size + _CRC.size
        if len(data) < start or data[:8] != _MAGIC:
            raise StoreError("this is no snapshot of producers", path=path, offset=0)
        _, position, length = _HEAD.unpack_from(data)
        table = data[start:]
        if len(table) != length or zlib.crc32(table, zlib.crc32(data[: _HEAD.size])) != _CRC.unpack_from(data, 24)[0]:
            raise StoreError("the snapshot of producers is damaged", path=path, offset=24)
        return cls(position, table)

    def save(self, path: Path) -> None:
        """Replace the file, durably. Raises OSError; the old one is still there then."""
        head = _HEAD.pack(_MAGIC, self.position, len(self.table))
        data = head + _CRC.pack(zlib.crc32(self.table, zlib.crc32(head))) + self.table
        disk.replace_content(path, data, "producers")


def may_have_producers(layout: StoreLayout) -> bool:
    """Whether a node has ever served the store: then a snapshot that is missing was lost."""
    return layout.producers.exists() or layout.store_file.exists()
