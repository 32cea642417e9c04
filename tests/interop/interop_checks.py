"""What the interop tests share: looks at a store's files and at the lines that describe its messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CRC_NAME = "__CRC32#"
Line = dict[str, Any]


def store_digests(root: Path) -> dict[str, str]:
    """SHA-256 of every CommitLog and ConsumeQueue file, by path under ``root``."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("commitlog", "consumequeue")
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
    }


def place(line: Line) -> tuple[str, int, int]:
    """Topic, queue and queue offset of a message."""
    return line["topic"], line["queue_id"], line["queue_offset"]


def without_crc(lines: Iterable[Line]) -> list[Line]:
    """Lines of the Java program without the property that protects the record and is none of the message's."""
    return [{**line, "properties": {k: v for k, v in line["properties"].items() if k != CRC_NAME}} for line in lines]


def in_log_order(lines: Iterable[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: line["physical_offset"])


def log_end(lines: Iterable[Line]) -> int:
    """Physical offset behind the last of ``lines``."""
    last = in_log_order(lines)[-1]
    return int(last["physical_offset"] + last["total_size"])


def assert_queues_are_whole(lines: Iterable[Line]) -> None:
    """Each queue's lines come in its order: offsets 0, 1, 2 … without a gap."""
    counts: dict[tuple[str, int], int] = {}
    for line in lines:
        key = line["topic"], line["queue_id"]
        assert line["queue_offset"] == counts.get(key, 0), f"queue {key} is out of order at {place(line)}"
        counts[key] = counts.get(key, 0) + 1
