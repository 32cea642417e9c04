"""Goal: a resent dead letter is the message that its producer sent, and its unique id is the same at every try.

Method: stored records as :class:`Message` objects, with what retries, timers and pops leave in them.
"""

from __future__ import annotations

from typing import Any

import pytest

from commitmq.client.dead_letters import DeadLetter, DeadLetterFilter, resent_properties
from commitmq.client.message import Message
from commitmq.format.message_id import UniqueIds

DIED_MS = 1_795_229_125_606


def letter(**more: Any) -> DeadLetter:
    message = Message(b"x", properties={"colour": "red"})
    own = {"TAGS": "hot", "KEYS": "a b", "__SHARDINGKEY": "s", "UNIQ_KEY": "7F" * 16}
    ways = {
        "RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "0A" * 16, "DELAY": "0", "WAIT": "false", "REAL_TOPIC": "%RETRY%g",
        "REAL_QID": "0", "TIMER_OUT_MS": "1", "TIMER_ENQUEUE_MS": "1", "POP_CK": "1 2", "1ST_POP_TIME": "5", "CLUSTER": "c",
        "TRACE_ON": "true", "ORIGIN_GROUP": "g", "__PSEQ__": "i:1:000000000000", "__CRC32#": "1234567890",
        "CONSUME_START_TIME": "5", "TRAN_MSG": "true", "__transactionId__": "t", "MAX_RECONSUME_TIMES": "16",
    }  # fmt: skip
    message.properties.update(own | ways)
    for name, value in {"topic": "%DLQ%g", "queue_id": 0, "queue_offset": 7, "physical_offset": 99,
                        "store_timestamp": DIED_MS, **more}.items():  # fmt: skip
        setattr(message, name, value)
    return DeadLetter(message, "orders")


def test_only_what_its_sender_gave_goes_along() -> None:
    found = resent_properties(letter())
    assert found.pop("UNIQ_KEY") == letter().resend_id
    assert found == {
        "TAGS": "hot", "KEYS": "a b", "__SHARDINGKEY": "s", "colour": "red",
        "DLQ_ORIGIN_TOPIC": "orders", "DLQ_ORIGIN_MESSAGE_ID": "0A" * 16,
    }  # fmt: skip


def test_the_id_follows_from_the_place_and_looks_like_every_unique_id() -> None:
    one = letter().resend_id
    assert one == letter().resend_id
    assert len(one) == 32
    assert one == one.upper()
    assert one[20:28] == UniqueIds().at(DIED_MS)[20:28], "the time of it, as in RocketMQ's ids"
    others = [
        letter(queue_offset=8),
        letter(physical_offset=98),
        letter(queue_id=1),
        letter(store_timestamp=DIED_MS + 1),
    ]
    assert len({one, *(other.resend_id for other in others)}) == 5


@pytest.mark.parametrize(
    ("conditions", "matches"),
    [
        ({}, True),
        ({"topic": "orders", "tag": "hot", "key": "b"}, True),
        ({"topic": "others"}, False),
        ({"tag": "cold"}, False),
        ({"key": "c"}, False),
        ({"begin": DIED_MS, "end": DIED_MS}, True),
        ({"begin": DIED_MS + 1}, False),
        ({"end": DIED_MS - 1}, False),
        ({"offsets": [6, 7]}, True),
        ({"offsets": [6]}, False),
    ],
    ids=str,
)
def test_a_filter_wants_all_its_conditions(conditions: dict[str, Any], matches: bool) -> None:
    assert DeadLetterFilter(**conditions).matches(letter()) is matches
