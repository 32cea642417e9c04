"""Goal: the columns for inner batches and further queues are what the record says, and units go where they belong.

Method: logs of records with all kinds of properties, walked by the kernel, compared with the decoded properties.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from commitmq.store.log import dispatch_batch
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from log_builder import SEGMENT_BYTES, build_log, message


def walk(folder: Path, *properties: dict[str, str], topic: str = "T") -> DispatchBatch:
    records = [message(number, topic=topic, size=10) for number in range(len(properties))]
    for record, own in zip(records, properties, strict=True):
        record.properties = own
    placed = build_log(folder / "commitlog", records)
    log = CommitLog(folder / "commitlog", SEGMENT_BYTES)
    return LogWalker(log, max_rows=100, max_bytes=1 << 20).walk(0, placed[-1].physical_offset + placed[-1].total_size)


@pytest.mark.parametrize(
    ("own", "base", "number"),
    [
        ({}, -1, -1),
        ({"INNER_NUM": "3", "INNER_BASE": "12"}, 12, 3),
        ({"INNER_NUM": "32767", "INNER_BASE": "999999999999999999"}, 999_999_999_999_999_999, 32767),
        ({"INNER_NUM": "32768", "INNER_BASE": "9999999999999999999"}, -1, -1),
        ({"INNER_NUM": "-1", "INNER_BASE": "x"}, -1, -1),
        ({"INNER_NUMB": "3", "INNER_BAS": "12", "xINNER_NUM": "4"}, -1, -1),
        ({"KEYS": "INNER_NUM", "INNER_BASE": "0"}, 0, -1),
    ],
)
def test_columns_of_inner_batches(tmp_path: Path, own: dict[str, str], base: int, number: int) -> None:
    row = walk(tmp_path, own).rows[0]
    assert (row["inner_base"], row["inner_num"]) == (base, number)


def units(*physical: tuple[int, int]) -> bytes:
    return b"".join(struct.pack(">qiq", offset, size, 0) for offset, size in physical)


def test_units_of_further_queues(tmp_path: Path) -> None:
    def both(names: str, offsets: str) -> dict[str, str]:
        return {"INNER_MULTI_DISPATCH": names, "INNER_MULTI_QUEUE_OFFSET": offsets}

    batch = walk(
        tmp_path,
        both("%LMQ%a,%LMQ%b", "0,7"),
        both("%LMQ%a", "1"),
        {"INNER_MULTI_DISPATCH": "%LMQ%a"},
        both("%LMQ%a,%LMQ%b", "2"),
        both("%LMQ%a,x/y,..,%LMQ%b,,plain", "9,1,1,8,1,4"),
        both("%LMQ%c,%LMQ%d", "-1,x"),
    )
    spans = [(int(row["physical_offset"]), int(row["size"])) for row in batch.rows]
    found = [(key, offset, bytes(data)) for key, offset, data in dispatch_batch.runs(batch, batch.rows)]
    assert found == [
        (("%LMQ%a", 0), 0, units(spans[0], spans[1])),
        (("%LMQ%b", 0), 7, units(spans[0], spans[4])),
        (("%LMQ%a", 0), 9, units(spans[4])),
        (("plain", 0), 4, units(spans[4])),
    ]


@pytest.mark.parametrize("topic", ["%RETRY%g", "rmq_sys_x", "SCHEDULE_TOPIC_XXXX"])
def test_topics_that_are_never_dispatched_further(tmp_path: Path, topic: str) -> None:
    own = {"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": "0"}
    batch = walk(tmp_path, own, topic=topic)
    assert dispatch_batch.runs(batch, batch.rows) == []
