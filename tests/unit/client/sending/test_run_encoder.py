"""Goal: both encoders make records that the store's own decoder reads back, for every host layout and topic length.

Method: encode_run and encode_messages make the same run, byte for byte, and decode_record reads it; hypothesis draws
bodies and keys.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commitmq import InvalidMessageError
from commitmq.client.results import RunAck
from commitmq.client.sending.run_encoder import (
    CRC_SLOT,
    EncodedRun,
    RunLayout,
    encode_messages,
    encode_run,
    encode_user_properties,
)
from commitmq.format.message_id import UniqueIds
from commitmq.format.producer_mark import mark_prefix
from commitmq.format.record import Record, decode_record
from one_message import OneMessage

IDS = UniqueIds()
TOPICS = ["T", "x" * 127, "%RETRY%" + "g" * 150]
LAYOUTS = [(born, store, crc) for born in (False, True) for store in (False, True) for crc in (False, True)]


def layout_of(topic: str, kind: tuple[bool, bool, bool]) -> RunLayout:
    return RunLayout(topic, born_v6=kind[0], store_v6=kind[1], properties_crc=kind[2])


def records_of(run: EncodedRun, *, crc_slot: bool) -> list[Record]:
    """Decode the run; the empty CRC slot is checked and taken away here, because its CRC is the node's to fill in."""
    records = []
    at = 0
    for size in map(int, run.sizes):
        data = run.data[at : at + size]
        record = decode_record(data, check_crc=False)
        assert record.total_size == size
        # The body's CRC must be right already: decode once more without the slot's own CRC being looked at.
        assert decode_record(_without_slot_crc(data, crc_slot)).body_crc == record.body_crc
        records.append(record)
        at += size
    assert at == len(run.data)
    return records


def _without_slot_crc(data: bytes, crc_slot: bool) -> bytes:
    if not crc_slot:
        return data
    assert data.endswith(CRC_SLOT)
    # A name that is not __CRC32# makes the slot an ordinary property.
    return data[:-20] + b"x" + data[-19:]


@pytest.mark.parametrize("topic", TOPICS, ids=["short", "longest v1", "v2"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_run_reads_back(topic: str, kind: tuple[bool, bool, bool]) -> None:
    bodies = [b"a", os.urandom(1024), b"\0" * 70_000]
    properties = encode_user_properties({"TAGS": "🚀x", "p": "q"})
    run = encode_run(layout_of(topic, kind), 3, bodies, properties, IDS, born=1_795_229_125_606, flags=[1, -2, 3])
    records = records_of(run, crc_slot=kind[2])
    unique = [record.properties.pop("UNIQ_KEY") for record in records]
    assert [record.body for record in records] == bodies
    assert [record.flag for record in records] == [1, -2, 3]
    assert isinstance(run.unique, tuple)
    assert unique == [f"{run.unique[0]}{run.unique[1] + index & 0xFFFF:04X}" for index in range(3)]
    for record in records:
        assert (record.topic, record.queue_id, record.version) == (topic, 3, 2 if len(topic) > 127 else 1)
        assert record.properties == {"TAGS": "🚀x", "p": "q"}
        assert record.born_timestamp == 1_795_229_125_606
        assert record.sys_flag == 0x10 * kind[0] + 0x20 * kind[1]
        assert (record.queue_offset, record.physical_offset, record.store_timestamp) == (0, 0, 0)
        assert (record.reconsume_times, record.prepared_transaction_offset) == (0, 0)


@pytest.mark.parametrize("topic", TOPICS, ids=["short", "longest v1", "v2"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_both_encoders_make_the_same_bytes(topic: str, kind: tuple[bool, bool, bool]) -> None:
    layout = layout_of(topic, kind)
    bodies = [b"one", b"two two", b"3" * 1000]
    properties = [encode_user_properties({"KEYS": f"k{index}"}) for index in range(3)]
    run = encode_run(layout, 2, bodies, properties, IDS, born=77, flags=[0, 1, 2], sys_flags=[0, 0x301, 0x101])
    assert isinstance(run.unique, tuple)
    messages = [
        OneMessage(body, (properties[index], index, (0, 0x301, 0x101)[index]), 77) for index, body in enumerate(bodies)
    ]
    sizes, data = encode_messages(layout, 2, messages, (run.unique[0].encode(), run.unique[1]))
    assert sizes == [layout.record_bytes(len(body), len(properties[index])) for index, body in enumerate(bodies)]
    assert data == run.data


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    encoded_extras=st.lists(
        st.none()
        | st.tuples(st.sampled_from([b"", b"TAGS\x01t\x02"]), st.integers(-5, 5), st.sampled_from([0, 0x301])),
        min_size=1,
        max_size=700,
    ),
    counter=st.integers(0, 0xFFFF) | st.integers(0xFC00, 0xFFFF),
    mark=st.sampled_from([b"", mark_prefix("id", 3)]),
    crc=st.booleans(),
)
def test_both_encoders_make_the_same_bytes_of_messages_of_different_kinds(
    encoded_extras: list[tuple[bytes, int, int] | None], counter: int, mark: bytes, crc: bool
) -> None:
    """With and without properties side by side, and ids whose digits carry, or begin at 0000 again."""
    layout = RunLayout("T", born_v6=False, store_v6=False, properties_crc=crc, mark=mark)
    messages = [OneMessage(b"%d" % index, one, 1000 + index // 3) for index, one in enumerate(encoded_extras)]
    sizes, data = encode_messages(layout, 1, messages, (b"P" * 28, counter), 40)
    ids = UniqueIds()
    ids._counter = counter
    run = encode_run(
        layout,
        1,
        [one.body for one in messages],
        [one.encoded_extras[0] if one.encoded_extras else b"" for one in messages],
        ids,
        born=0,
        flags=[one.encoded_extras[1] if one.encoded_extras else 0 for one in messages],
        sys_flags=[one.encoded_extras[2] if one.encoded_extras else 0 for one in messages],
        sequence=40,
    )
    assert isinstance(run.unique, tuple)
    assert sizes == list(run.sizes)
    at = 0
    expected = bytearray(run.data.replace(run.unique[0].encode(), b"P" * 28))
    for one, size in zip(messages, sizes, strict=True):
        expected[at + 40 : at + 48] = one.born.to_bytes(8, "big")
        at += size
    assert data == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    bodies=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=40),
    keys=st.lists(
        st.text(st.characters(exclude_characters="\0\1\2", exclude_categories=["Cs"]), min_size=1), min_size=1
    ),
    kind=st.sampled_from(LAYOUTS),
)
def test_any_bodies_and_keys_read_back(bodies: list[bytes], keys: list[str], kind: tuple[bool, bool, bool]) -> None:
    each = [keys[index % len(keys)] for index in range(len(bodies))]
    properties = [encode_user_properties({"KEYS": key}) for key in each]
    records = records_of(encode_run(layout_of("T", kind), 0, bodies, properties, IDS, born=0), crc_slot=kind[2])
    assert [record.body for record in records] == bodies
    assert [record.properties["KEYS"] for record in records] == each


def test_properties_beyond_the_format_are_refused() -> None:
    layout = layout_of("T", (False, False, True))
    with pytest.raises(InvalidMessageError, match="the properties take 32769 bytes"):
        encode_run(layout, 0, [b"x"], b"p\x01" + b"y" * 32_704 + b"\x02", IDS, born=0)


def test_results_of_a_run_that_met_a_segments_end() -> None:
    """The answer names the parts; each message's place follows from the sizes of those before it in its part."""
    answer = {
        "ok": True,
        "queue_offset": 10,
        "physical_offset": 900,
        "store_timestamp": 5,
        "msg_id": "7F00000100002A9F0000000000000384",
        "ack": "memory",
        "parts": [[2, 900], [1, 4096], [3, 8192]],
    }
    ack = RunAck("T", 1, "memory", [100, 200, 300, 400, 500, 600], ("P" * 28, 0xFFFE), answer)
    results = [ack.result(index) for index in range(6)]
    assert [one.physical_offset for one in results] == [900, 1000, 4096, 8192, 8592, 9092]
    assert [one.queue_offset for one in results] == [10, 11, 12, 13, 14, 15]
    assert [one.unique_id[-4:] for one in results] == ["FFFE", "FFFF", "0000", "0001", "0002", "0003"]
    assert results[2].msg_id == "7F00000100002A9F0000000000001000"
