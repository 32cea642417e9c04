"""Spec 4.2 once more, in plain Python and one item at a time: what index files must be, byte for byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from commitmq.format.index import IndexShape
from commitmq.format.java import java_string_hash
from commitmq.format.record import Record

_HEADER = struct.Struct(">qqqqii")
_ITEM = struct.Struct(">iqii")


def keys_of(record: Record) -> list[str]:
    """What a record is indexed under, in order (without the topic)."""
    if record.sys_flag & 0xC == 0xC:
        return []
    properties = record.properties
    keys = [properties["UNIQ_KEY"]] if "UNIQ_KEY" in properties else []
    keys += [key for key in properties.get("KEYS", "").split(" ") if key]
    return keys + ([f"T#{properties['TAGS']}"] if "TAGS" in properties else [])


@dataclass
class ModelFile:
    """One file as Python values; ``items[0]`` is never used."""

    shape: IndexShape
    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    slots_used: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    items: list[tuple[int, int, int, int]] = field(default_factory=lambda: [(0, 0, 0, 0)])

    @property
    def is_full(self) -> bool:
        return len(self.items) >= self.shape.max_items

    def put(self, key: str, offset: int, stamp: int) -> None:
        value = java_string_hash(key)
        hashed = 0 if value == -(2**31) else abs(value)
        slot = hashed % self.shape.hash_slots
        old = self.slots.get(slot, 0)
        seconds = 0 if self.begin_timestamp <= 0 else (stamp - self.begin_timestamp) // 1000
        number = len(self.items)
        self.items.append((hashed, offset, min(max(seconds, 0), 2**31 - 1), old))
        self.slots[slot] = number
        if number <= 1:
            self.begin_offset, self.begin_timestamp = offset, stamp
        self.slots_used += not old
        self.end_offset, self.end_timestamp = offset, stamp

    def to_bytes(self) -> bytes:
        header = _HEADER.pack(
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_offset,
            self.end_offset,
            self.slots_used,
            len(self.items),
        )
        slots = struct.pack(f">{self.shape.hash_slots}i", *(self.slots.get(n, 0) for n in range(self.shape.hash_slots)))
        items = b"".join(_ITEM.pack(*item) for item in self.items)
        return (header + slots + items).ljust(self.shape.file_bytes, b"\0")


def model_files(records: Iterable[Record], shape: IndexShape) -> list[ModelFile]:
    """The files that RocketMQ makes of ``records`` (with their places), oldest first."""
    files: list[ModelFile] = []
    for record in records:
        for key in (None, *keys_of(record)):  # room is looked for before a record too
            if not files or files[-1].is_full:
                files.append(_successor(files, shape))
            if key is not None:
                files[-1].put(f"{record.topic}#{key}", record.physical_offset, record.store_timestamp)
    return files


def _successor(files: list[ModelFile], shape: IndexShape) -> ModelFile:
    if not files:
        return ModelFile(shape)
    end_timestamp, end_offset = files[-1].end_timestamp, files[-1].end_offset
    return ModelFile(shape, end_timestamp, end_timestamp, end_offset, end_offset)


def matches(records: Iterable[Record], topic: str, kind: str, key: str) -> Iterator[int]:
    """Physical offsets of the records that a query must find, oldest first."""
    for record in records:
        kinds: dict[str, list[str | None]] = {
            "key": [*record.properties.get("KEYS", "").split(" ")],
            "unique": [record.properties.get("UNIQ_KEY")],
            "tag": [record.properties.get("TAGS")],
        }
        if record.topic == topic and key in kinds[kind]:
            yield record.physical_offset
