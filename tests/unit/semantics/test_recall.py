"""Goal: a timer message is cancelled by RocketMQ's handle and record.

Method: every recall record of the golden store is made anew from the record that it cancels; handles are encoded and
decoded; each check is tried by hand.
"""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.semantics.timer import (
    RECALL_TAG,
    TIMER_TOPIC,
    RecallHandle,
    TimerRefusedError,
    TimerRules,
    delete_key,
    recall_handle,
    recall_record,
    timer_request,
)
from pending_store import BROKER, PendingStore

DAYS_7 = TimerRules(max_delay_s=604_800)
HANDLE = RecallHandle("orders", "b0", 1_795_339_386_001, "AB")


def test_a_recall_is_stored_as_rocketmq_stores_it(pending: PendingStore) -> None:
    found = 0
    for record in pending.of(TIMER_TOPIC):
        if record.properties.get(Property.TAGS) == RECALL_TAG:
            (timer,) = [
                one
                for one in pending.with_key(TIMER_TOPIC, record.properties[Property.UNIQUE_KEY])
                if Property.TIMER_DELETE_KEY not in one.properties
            ]
            handle = recall_handle(timer, "b0")
            assert handle is not None
            now_ms = int(record.properties[Property.BORN_TIMESTAMP])
            recall = recall_record(handle, "Pending_producer", now_ms, record.born_host, DAYS_7)
            made = timer_request(recall, now_ms, DAYS_7, fresh=True)
            assert made is not None
            assert pending.has(made, record)
            found += 1
    assert found == 4


def test_the_handles_text_is_rocketmqs() -> None:
    text = HANDLE.encode()
    assert base64.urlsafe_b64decode(text) == b"v1 orders b0 1795339386001 AB"
    assert len(text) % 4 == 0, "the padding stays"
    assert RecallHandle.decode(text) == HANDLE


word = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=" "), min_size=1, max_size=20)


@given(st.builds(RecallHandle, word, word, st.integers(0, 2**63 - 1), word))
def test_a_handle_comes_back_from_its_text(handle: RecallHandle) -> None:
    assert RecallHandle.decode(handle.encode()) == handle


@pytest.mark.parametrize("text", [b"v2 t b 1 k", b"v1 t b x k", b"v1 t b 1", b"v1 t b 1 k more", b"", b"\xff"])
def test_another_text_is_no_handle(text: bytes) -> None:
    with pytest.raises(InvalidMessageError, match="recall handle is invalid"):
        RecallHandle.decode(base64.urlsafe_b64encode(text).decode())
    with pytest.raises(InvalidMessageError, match="recall handle is invalid"):
        RecallHandle.decode("no base64!")


@pytest.mark.parametrize("left_ms", [0, -1, 259_200_000])
def test_a_time_that_passed_or_is_too_far_cannot_be_recalled(left_ms: int) -> None:
    with pytest.raises(TimerRefusedError) as caught:
        recall_record(HANDLE, "g", HANDLE.deliver_ms - left_ms, BROKER)
    assert caught.value.code == "ILLEGAL_OPERATION"


def test_a_recall_is_due_in_the_slot_of_its_message() -> None:
    timer = Record(TIMER_TOPIC, properties={"REAL_TOPIC": "t", "UNIQ_KEY": "AB", "TIMER_OUT_MS": "386000"})
    handle = recall_handle(timer, "b0")
    assert handle is not None
    made = timer_request(recall_record(handle, "g", 1_000, BROKER), 1_000, fresh=True)
    assert made is not None
    assert made.properties[Property.TIMER_OUT_MS] == "386000"


def test_a_message_without_a_unique_id_has_no_handle() -> None:
    assert recall_handle(Record(TIMER_TOPIC, properties={"REAL_TOPIC": "t", "TIMER_OUT_MS": "1"}), "b0") is None


def test_the_delete_key_is_the_bare_unique_id() -> None:
    assert delete_key("orders", "AB") == "AB"
    assert delete_key("orders", "AB", with_topic=True) == "orders+AB"
