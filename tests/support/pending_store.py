"""The golden store ``semantics`` as its records, for tests that make RocketMQ's records anew."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from commitmq.format.constants import Host, Property
from commitmq.format.record import Record, decode_record, encode_record, peek
from commitmq.format.timer import UNIT_BYTES, TimerUnit, decode_unit

BROKER = Host("127.0.0.1", 39911)
TIMER_LOG_FILE_BYTES = 1_040


@dataclass(frozen=True)
class PendingStore:
    """Every record of the store in log order, with its bytes by physical offset."""

    root: Path
    records: list[Record] = field(default_factory=list)
    data: dict[int, bytes] = field(default_factory=dict)

    def of(self, *topics: str) -> list[Record]:
        """The records of ``topics``, in log order."""
        return [record for record in self.records if record.topic in topics]

    def at(self, physical_offset: int) -> Record:
        """The record at ``physical_offset``."""
        return next(record for record in self.records if record.physical_offset == physical_offset)

    def with_key(self, topic: str, unique_key: str) -> list[Record]:
        """The records of ``topic`` with this unique id, in log order."""
        return [one for one in self.of(topic) if one.properties.get(Property.UNIQUE_KEY) == unique_key]

    def has(self, made: Record, stored: Record) -> bool:
        """Whether ``made``, at the place of ``stored`` and with its clock, has the bytes that RocketMQ stored there."""
        return self.encoded(made, stored) == self.data[stored.physical_offset]

    def encoded(self, made: Record, stored: Record) -> bytes:
        """``made`` with what the writer fills in, taken from ``stored``."""
        placed = replace(
            made,
            queue_offset=stored.queue_offset,
            physical_offset=stored.physical_offset,
            store_timestamp=stored.store_timestamp,
            store_host=BROKER,
        )
        return encode_record(placed, buckets=None, empty_values=True)

    def timer_log(self) -> list[tuple[int, TimerUnit]]:
        """(position, unit) of the whole timer log."""
        found = []
        for path in sorted((self.root / "timerlog").iterdir()):
            data = path.read_bytes()
            for offset in range(0, len(data), UNIT_BYTES):
                unit = decode_unit(data, offset)
                if not isinstance(unit, TimerUnit):
                    break
                found.append((int(path.name) + offset, unit))
        return found


def blank(record: bytes, *, prepared: bool = True) -> bytes:
    """``record``, of IPv4 hosts, with zeros where the writer fills in: queue and physical offset, store time and host.

    ``prepared``: in the prepared offset too, which a mover leaves to the writer.
    """
    data = bytearray(record)
    data[20:36] = bytes(16)
    data[56:72] = bytes(16)
    if prepared:
        data[76:84] = bytes(8)
    return bytes(data)


def read_pending_store(root: Path) -> PendingStore:
    """The store below ``root``."""
    store = PendingStore(root)
    for path in sorted((root / "commitlog").iterdir()):
        data = path.read_bytes()
        offset = 0
        while peek(data, offset)[0] > 0 and peek(data, offset)[1] in (-626843481, -626843477):
            record = decode_record(data, offset, expected_physical_offset=int(path.name) + offset)
            store.records.append(record)
            store.data[record.physical_offset] = data[offset : offset + record.total_size]
            offset += record.total_size
    return store
