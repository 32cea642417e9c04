"""Goal: trace records are RocketMQ's, also those of older and other clients.

Method: the golden store's trace message is decoded and encoded again, its KEYS made anew; the forms that readers must
accept are written by hand; round trips over generated records.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.semantics.trace import (
    TRACE_TOPIC,
    ConsumeReturnType,
    EndTransactionTrace,
    MessageType,
    Pub,
    RecallTrace,
    SubAfter,
    SubBefore,
    TraceRecord,
    decode_trace,
    encode_trace,
    trace_keys,
)
from pending_store import PendingStore


def record(*fields: str) -> bytes:
    return ("\x01".join(fields) + "\x02").encode()


def test_the_golden_trace_message_comes_back_byte_for_byte(pending: PendingStore) -> None:
    (message,) = pending.of(TRACE_TOPIC)
    found = decode_trace(message.body)
    assert [type(one) for one in found] == [Pub] * 3
    assert encode_trace(found) == message.body
    assert trace_keys(found) == message.properties["KEYS"]
    sent = {one.properties["UNIQ_KEY"]: one for one in pending.of("PendingTraced")}
    for one in found:
        assert isinstance(one, Pub)
        source = sent[str(one.message_id)]
        assert (one.tags, one.keys, one.body_bytes) == ("X", source.properties["KEYS"], len(source.body))
        assert one.offset_message_id == source.offset_msg_id


PUB = ("Pub", "1", "DefaultRegion", "g", "orders", "ID", "null", "k1 k2", "10.0.0.1:10911", "5", "3", "1")


def test_pub_of_every_client_is_read() -> None:
    """12 fields behind the kind are an old client's, 13 Java's, 14 the Go client's with its host."""
    (old,) = decode_trace(record(*PUB, "true"))
    (java,) = decode_trace(record(*PUB, "OFFSET", "false"))
    (go,) = decode_trace(record(*PUB, "OFFSET", "true", "10.0.0.9"))
    assert isinstance(old, Pub)
    assert (old.offset_message_id, old.success, old.client_host) == (None, True, None)
    assert isinstance(java, Pub)
    assert (java.offset_message_id, java.success, java.tags) == ("OFFSET", False, None)
    assert java.message_type is MessageType.HALF
    assert isinstance(go, Pub)
    assert go.client_host == "10.0.0.9"
    assert encode_trace([java, go]) == record(*PUB, "OFFSET", "false") + record(*PUB, "OFFSET", "true", "10.0.0.9")


def test_sub_after_of_every_client_is_read() -> None:
    head = ("SubAfter", "REQUEST", "ID", "7", "false", "k")
    texts = [record(*head), record(*head, "4"), record(*head, "4", ""), record(*head, "4", "99", "g")]
    found = [one for text in texts for one in decode_trace(text)]
    assert all(isinstance(one, SubAfter) for one in found)
    assert [one.result for one in found if isinstance(one, SubAfter)] == [
        ConsumeReturnType.SUCCESS,
        *[ConsumeReturnType.FAILED] * 3,
    ]
    assert encode_trace(found[3:]) == texts[3]


def test_the_other_kinds_have_their_fields_in_order() -> None:
    before = record("SubBefore", "1", "DefaultRegion", "g", "REQUEST", "ID", "2", "null")
    end = record(
        *("EndTransaction", "1", "DefaultRegion", "g", "orders", "ID", "null", "k", "10.0.0.1:1", "2", "TX"),
        *("COMMIT_MESSAGE", "true"),
    )
    recall = record("Recall", "1", "DefaultRegion", "g", "orders", "ID", "false")
    found = decode_trace(before + end + recall)
    assert [type(one) for one in found] == [SubBefore, EndTransactionTrace, RecallTrace]
    assert encode_trace(found) == before + end + recall
    assert isinstance(found[1], EndTransactionTrace)
    assert (found[1].message_type, found[1].state, found[1].from_check) == (MessageType.COMMIT, "COMMIT_MESSAGE", True)


def test_an_unknown_kind_is_skipped_and_a_broken_record_refused() -> None:
    assert decode_trace(b"") == []
    assert decode_trace(record("Later", "1") + record("Recall", "1", "r", "g", "t", "ID", "true"))[0].kind == "Recall"
    for broken in (record("Pub", "1"), record("Recall", "x", "r", "g", "t", "ID", "true")):
        with pytest.raises(InvalidMessageError, match="no valid trace record"):
            decode_trace(broken)


def test_a_separator_inside_a_text_is_refused() -> None:
    recall = RecallTrace(timestamp=1, region="r", group="g\x01", topic="t", message_id="ID", success=True)
    with pytest.raises(InvalidMessageError, match="0x01 or 0x02"):
        encode_trace([recall])


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=9)
texts = st.none() | words.filter(lambda text: text != "null")
numbers = st.integers(0, 2**62)
plain = {"region": texts, "group": texts, "message_id": texts, "keys": texts}
RECORDS: st.SearchStrategy[TraceRecord] = st.one_of(
    st.builds(Pub, timestamp=numbers, topic=texts, tags=texts, store_host=texts, body_bytes=numbers, cost_ms=numbers,
              message_type=st.sampled_from(MessageType), offset_message_id=texts, success=st.booleans(), **plain),
    st.builds(SubBefore, timestamp=numbers, request_id=texts, retry_times=numbers, **plain),
    st.builds(SubAfter, request_id=texts, message_id=texts, cost_ms=numbers, success=st.booleans(), keys=texts,
              result=st.sampled_from(ConsumeReturnType), timestamp=numbers, group=texts),
    st.builds(EndTransactionTrace, timestamp=numbers, topic=texts, tags=texts, store_host=texts, state=words,
              message_type=st.sampled_from(MessageType), transaction_id=texts, from_check=st.booleans(), **plain),
    st.builds(RecallTrace, timestamp=numbers, region=texts, group=texts, topic=texts, message_id=texts, success=st.booleans()),
)  # fmt: skip


@given(st.lists(RECORDS, max_size=5))
def test_records_come_back_from_a_body(records: list[TraceRecord]) -> None:
    assert decode_trace(encode_trace(records)) == records


def test_keys_are_the_ids_and_keys_of_all_records_once() -> None:
    recall = RecallTrace(timestamp=1, region=None, group=None, topic=None, message_id="ID", success=True)
    before = SubBefore(
        timestamp=1, region=None, group=None, request_id=None, message_id="ID", retry_times=0, keys="b a"
    )
    assert sorted(trace_keys([recall, before]).split(" ")) == ["ID", "a", "b"]
    assert trace_keys([]) == ""
