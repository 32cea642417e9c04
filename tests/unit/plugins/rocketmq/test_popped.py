"""Goal: the answer to a pop has texts of which a client makes one receipt handle for each record, also for records that came
back and for several check points of one queue.

Method: answers as those of the process pop, with made records; the texts are read as RocketMQ's client reads them.
"""

from __future__ import annotations

from typing import Any

from commitmq.format.record import Record, decode_record, encode_record
from commitmq.semantics.pop import ReceiptHandle, parse_info
from commitmq_plugins.rocketmq.broker.popping import Popped

RETRY = "%RETRY%g_T"


def record(topic: str, queue: int, offset: int) -> bytes:
    made = Record(
        topic=topic, queue_id=queue, body=b"%d" % offset, properties={"UNIQ_KEY": f"{offset:032X}", "TAGS": "a"}
    )
    made.queue_offset, made.physical_offset = offset, 1000 + offset
    return encode_record(made, properties_crc=True)


def part(stored: str, queue: int, start: int, offsets: list[int], **more: Any) -> dict[str, Any]:
    flag = int(stored != "T")
    return {"topic": "T", "stored": stored, "queue": queue, "flag": flag, "start_offset": start, "next_offset": 0,
            "count": len(offsets), "frames": 1, **more}  # fmt: skip


def answer(*parts: dict[str, Any], revive_queue: int = 3) -> dict[str, Any]:
    return {
        "parts": list(parts),
        "pop_time": 1_000,
        "invisible_ms": 60_000,
        "revive_queue": revive_queue,
        "broker": "b",
    }


def frame(topic: str, queue: int, offsets: list[int]) -> bytes:
    return b"".join(record(topic, queue, offset) for offset in offsets)


def test_plain_records_stay_as_they_are() -> None:
    frames = [frame("T", 2, [40, 41]), frame("T", 0, [7])]
    popped = Popped(answer(part("T", 2, 40, [40, 41]), part("T", 0, 5, [7])), frames)
    assert b"".join(popped.body) == b"".join(frames)
    assert popped.texts() == {"startOffsetInfo": "0 2 40;0 0 5", "msgOffsetInfo": "0 2 40,41;0 0 7"}
    assert popped.handles[2] == ("T", "5 1000 60000 3 0 b 0 7")


def test_a_record_that_came_back_has_the_asked_topic_and_its_handle() -> None:
    popped = Popped(answer(part("T", 0, 1, [1]), part(RETRY, 0, 5, [5])), [frame("T", 0, [1]), frame(RETRY, 0, [5])])
    back = decode_record(bytes(popped.body[1]), check_crc=True)
    assert (back.topic, back.queue_offset, back.physical_offset, back.body) == ("T", 5, 1005, b"5")
    assert back.properties == {"UNIQ_KEY": f"{5:032X}", "TAGS": "a", "POP_CK": "5 1000 60000 3 1 b 0 5"}
    assert popped.texts() == {"startOffsetInfo": "0 0 1;1 0 5", "msgOffsetInfo": "0 0 1;1 0 5"}


def test_a_queue_comes_once_in_the_texts() -> None:
    parts = (part("T", 0, 1, [1, 2]), part("T", 0, 3, [4]))
    popped = Popped(answer(*parts), [frame("T", 0, [1, 2]), frame("T", 0, [4])])
    assert popped.texts() == {"startOffsetInfo": "0 0 1", "msgOffsetInfo": "0 0 1,2,4"}
    assert parse_info(popped.texts()["msgOffsetInfo"]) == {"0@0": "1,2,4"}
    second = decode_record(bytes(popped.body[2]), check_crc=True)
    assert ReceiptHandle.parse(second.properties["POP_CK"]).start_offset == 3, "its check point is another one"
    assert "POP_CK" not in decode_record(bytes(popped.body[0]), check_crc=True).properties


def test_ordered_records_have_their_counts() -> None:
    popped = Popped(answer(part("T", 2, 40, [40, 41], counts=[[40, 1]]), revive_queue=999), [frame("T", 2, [40, 41])])
    assert popped.texts()["orderCountInfo"] == "0 qo2%40 1;0 2 0"
    assert ReceiptHandle.parse(popped.handles[0][1]).is_ordered
