"""Builds small CommitLogs on disk by the rules of spec 2.11, independently of the node's writer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from commitmq.format.constants import Host
from commitmq.format.file_names import segment_name
from commitmq.format.record import Record, encode_filler, encode_record

SEGMENT_BYTES = 4096
HOST = Host("127.0.0.1", 10911)


def message(number: int, *, topic: str = "T", size: int = 300, time: int | None = None) -> Record:
    """A record with a body of ``size`` bytes that depends on ``number``."""
    body = (f"{number:08d}" * (size // 8 + 1))[:size].encode()
    stamp = 1_000 + number if time is None else time
    return Record(topic, queue_offset=number, body=body, store_timestamp=stamp, born_host=HOST, store_host=HOST)


def build_log(
    folder: Path, records: Iterable[Record], *, start: int = 0, segment_bytes: int = SEGMENT_BYTES
) -> list[Record]:
    """Write the records from physical offset ``start`` (a segment's base) on; returns them with place and size."""
    folder.mkdir(parents=True, exist_ok=True)
    data = bytearray()
    placed = []
    for record in records:
        size = len(encode_record(record))
        left = segment_bytes - len(data) % segment_bytes
        if size + 8 > left:
            data += encode_filler(left).ljust(left, b"\0")
        put = replace(record, physical_offset=start + len(data))
        raw = encode_record(put)
        placed.append(replace(put, total_size=len(raw), body_crc=int.from_bytes(raw[8:12])))
        data += raw
    for at in range(0, max(1, len(data)), segment_bytes):
        chunk = bytes(data[at : at + segment_bytes]).ljust(segment_bytes, b"\0")
        (folder / segment_name(start + at)).write_bytes(chunk)
    return placed


def unit(offset: int, size: int = 100, code: int = 0) -> bytes:
    """One ConsumeQueue unit."""
    return offset.to_bytes(8, signed=True) + size.to_bytes(4, signed=True) + code.to_bytes(8, signed=True)
