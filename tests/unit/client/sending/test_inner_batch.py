"""Goal: inner batches survive the way out and in, whatever is in them; what is no batch is refused, never misread.

Method: hypothesis round trips against the plain-Python codec of the store, and records cut short at every byte.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.client.receiving.batch import MessageBatch
from commitmq.client.receiving.part import parts_of_records
from commitmq.client.sending.inner_batch import encode_batch, expand, renumber
from commitmq.errors import CorruptRecordError, InvalidMessageError
from commitmq.format.client_batch import BatchElement, decode_client_batch, encode_client_batch
from commitmq.format.compression import compress, compression_flags
from commitmq.format.constants import Host
from commitmq.format.message_id import UniqueIds
from commitmq.format.properties import encode_properties
from commitmq.format.record import Record, encode_record
from commitmq.store.log.run_check import FORBIDDEN_PROPERTIES
from commitmq.workers.writer.put_rules import count_messages

text = st.text(st.characters(codec="utf-8", exclude_characters="\0\1\2"), min_size=1, max_size=8)
properties = st.dictionaries(
    text.filter(lambda name: name not in ("UNIQ_KEY", *FORBIDDEN_PROPERTIES)), text, max_size=3
)
elements = st.lists(st.tuples(st.binary(max_size=40), properties, st.integers(-(1 << 31), (1 << 31) - 1)), min_size=1)
HOSTS = {False: Host("10.0.0.1", 10911), True: Host("fe80::1", 10911)}


def record_of(
    messages: list[BatchElement], *, base: int = 0, queue: int = 3, v6: bool = False, compressed: str | None = None
) -> bytes:
    body = encode_client_batch(messages)
    flags = 0xC0
    if compressed:
        body, flags = compress(body, compressed), flags | compression_flags(compressed)
    own = {"INNER_NUM": str(len(messages)), "INNER_BASE": str(base)}
    return encode_record(
        Record(
            "batches", queue, base, 77, sys_flag=flags, body=body, properties=own, born_timestamp=5, store_timestamp=6,
            born_host=HOSTS[v6], store_host=HOSTS[v6],
        )
    )  # fmt: skip


def read(*records: bytes, asked: int = 0, tags: frozenset[str] | None = None) -> MessageBatch:
    return MessageBatch(expand(parts_of_records("batches", 3, [memoryview(b"".join(records))]), asked, tags))


@given(elements, st.booleans())
def test_what_goes_out_is_a_client_batch(some: list[tuple[bytes, dict[str, str], int]], shared: bool) -> None:
    bodies = [body for body, _, _ in some]
    sizes = np.array([len(body) for body in bodies])
    each = [encode_properties(one, buckets=None) for _, one, _ in some]
    own: bytes | list[bytes] = each[0] if shared else each
    data, (prefix, counter) = encode_batch(
        bodies, own, UniqueIds(), body_sizes=sizes, flags=[flag for _, _, flag in some]
    )
    assert count_messages(data) == len(some)
    for number, (element, (body, _, flag)) in enumerate(zip(decode_client_batch(data), some, strict=True)):
        assert (element.body, element.flag) == (body, flag)
        unique = f"UNIQ_KEY\x01{prefix}{(counter + number) & 0xFFFF:04X}\x02".encode()
        assert element.properties == (each[0] if shared else each[number]) + unique
    assert data == encode_client_batch(decode_client_batch(data))


def test_properties_too_large_for_their_field() -> None:
    with pytest.raises(InvalidMessageError, match="32767"):
        encode_batch([b"x"], b"k\x01" + b"v" * 32_760 + b"\x02", UniqueIds(), body_sizes=np.array([1]))


@given(st.lists(elements, min_size=1, max_size=4), st.integers(0, 12), st.booleans(), st.sampled_from([None, "zlib"]))
def test_what_comes_in_is_single_messages(
    batches: list[list[tuple[bytes, dict[str, str], int]]], asked: int, v6: bool, compressed: str | None
) -> None:
    expected = []
    records = []
    base = 0
    for some in batches:
        messages = [BatchElement(body, encode_properties(own), flag) for body, own, flag in some]
        records.append(record_of(messages, base=base, v6=v6, compressed=compressed))
        expected += [(base + i, *one) for i, one in enumerate(some)]
        base += len(some)
    wanted = [one for one in expected if one[0] >= asked]
    found = read(*records, asked=asked)
    assert [(one.queue_offset, one.body, one.properties, one.flag) for one in found] == wanted
    assert [bytes(body) for body in found.bodies] == [body for _, body, _, _ in wanted]
    assert found.queue_offset.tolist() == [offset for offset, _, _, _ in wanted]
    host = "0A000001" if not v6 else "FE80" + "0" * 27 + "1"
    assert {one.msg_id for one in found} <= {f"{host}00002A9F{77:016X}"}
    for cut in range(0, len(found), 3):
        assert [one.queue_offset for one in found[cut : cut + 2]] == [one[0] for one in wanted[cut : cut + 2]]


def test_batches_between_plain_messages() -> None:
    plain = encode_record(Record("batches", 3, 0, 0, body=b"plain", born_host=HOSTS[False], store_host=HOSTS[False]))
    found = read(plain, record_of([BatchElement(b"a"), BatchElement(b"b")], base=1), plain)
    assert [one.body for one in found] == [b"plain", b"a", b"b", b"plain"]


def test_tags_choose_among_the_messages_inside() -> None:
    tagged = [
        BatchElement(b"%d" % i, b"" if tag is None else encode_properties({"TAGS": tag}))
        for i, tag in enumerate(["A", None, "B", "A"])
    ]
    assert [one.queue_offset for one in read(record_of(tagged, base=10), tags=frozenset("A"))] == [10, 13]
    assert not read(record_of(tagged), tags=frozenset(["C"]))


def test_a_batch_that_is_none() -> None:
    good = encode_client_batch([BatchElement(b"abc", encode_properties({"k": "v"})), BatchElement(b"de")])
    whole = (len(encode_client_batch([BatchElement(b"abc", encode_properties({"k": "v"}))])), len(good))
    for size in range(1, len(good)):
        if size in whole:
            continue
        record = Record(
            "batches", 3, 0, 0, sys_flag=0xC0, body=good[:size], born_host=HOSTS[False], store_host=HOSTS[False]
        )
        with pytest.raises(CorruptRecordError, match="physical offset 0"):
            read(encode_record(record))


def test_a_compressed_batch_that_is_none_stops_its_queue() -> None:
    """No sender of ours can store one; files of RocketMQ may hold one."""
    record = Record(
        "batches", 3, 0, 0, sys_flag=0xC1, body=b"no zlib data", born_host=HOSTS[False], store_host=HOSTS[False]
    )
    with pytest.raises(CorruptRecordError, match="zlib"):
        read(encode_record(record))


def test_messages_read_through_a_light_queue() -> None:
    def record(topic: str, names: str, offsets: str, body: bytes) -> bytes:
        own = {"a": "b", "INNER_MULTI_DISPATCH": names, "INNER_MULTI_QUEUE_OFFSET": offsets, "z": "y"}
        return encode_record(
            Record(topic, 9, 400, 0, body=body, properties=own, born_host=HOSTS[False], store_host=HOSTS[False])
        )

    name = "%LMQ%x"
    long_topic = "t" * 200
    data = record("first", "%LMQ%x", "5", b"1") + record(long_topic, "%LMQ%w,%LMQ%x,%LMQ%y", "9,6,1", b"22")
    (part,) = parts_of_records(name, 0, [memoryview(data)])
    found = list(MessageBatch([renumber(part)]))
    assert [(one.topic, one.queue_id, one.queue_offset, one.body) for one in found] == [
        (name, 0, 5, b"1"),
        (name, 0, 6, b"22"),
    ]
    assert [one.origin_topic for one in found] == ["first", long_topic]
    assert [one.properties["z"] for one in found] == ["y", "y"]
    for names, offsets in [("%LMQ%w", "5"), ("%LMQ%x", "x"), ("%LMQ%w,%LMQ%x", "5")]:
        (part,) = parts_of_records(name, 0, [memoryview(record("first", names, offsets, b"1"))])
        with pytest.raises(CorruptRecordError, match="does not say"):
            renumber(part)
