"""Goal: records that a gateway makes from a form are those of a single send, byte for byte; a client batch becomes the run of
its messages, and one that lies becomes nothing.

Method: any messages (hypothesis) against the encoder of single sends and the decoder of client batches, which are pure Python;
a table of wrong batches; batches with random bytes changed, in a page behind which nothing may be read.
"""

from __future__ import annotations

import mmap
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import CorruptRecordError
from commitmq.format.client_batch import BatchElement, decode_client_batch, encode_client_batch
from commitmq.format.constants import MAX_PROPERTIES_BYTES, Host
from commitmq.format.message_id import pack_host
from commitmq.store.log.run_check import MessageIllegalError, RecordForm, RunCheck

HOSTS = [pack_host(Host("127.0.0.1", 10911)), pack_host(Host("::1", 10911))]
BORN = 1_763_800_000_000
MOST = 300


def check_of(*, crc: bool = False, host: bytes = HOSTS[0]) -> RunCheck:
    return RunCheck(store_host=host, max_message_bytes=MOST, properties_crc=crc)


PAIRS = st.lists(st.sampled_from([b"K\x01v\x02", b"TAGS\x01blue\x02", "ü\x01ß\x02".encode()]), max_size=3).map(b"".join)
ELEMENTS = st.builds(BatchElement, st.binary(max_size=40), PAIRS, st.integers(-(1 << 31), (1 << 31) - 1))
FORMS = st.fixed_dictionaries(
    {
        "queue_id": st.integers(0, 1 << 20),
        "sys_flag": st.sampled_from([0, 1, 0x101, 0x301]),
        "born_host": st.sampled_from(HOSTS),
        "reconsume_times": st.integers(0, 16),
    }
)


@given(
    st.sampled_from(["T", "t" * 127, "t" * 200]),
    FORMS,
    st.lists(ELEMENTS, min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(HOSTS),
)
def test_records_are_those_of_single_sends(
    topic: str, fields: dict[str, object], elements: list[BatchElement], crc: bool, host: bytes
) -> None:
    check = check_of(crc=crc, host=host)

    def form_of(flag: int) -> RecordForm:
        return RecordForm(check, topic.encode(), flag=flag, **fields)  # type: ignore[arg-type]

    expected = [
        bytes(
            check.encode(
                topic.encode(),
                body=one.body,
                properties=one.properties,
                flag=one.flag,
                born_timestamp=BORN,
                checked=True,
                **fields,  # type: ignore[arg-type]
            )
        )
        for one in elements
    ]
    assert [form_of(one.flag).record(one.body, one.properties, BORN) for one in elements] == expected
    # A batch's messages have flags of their own.
    run, sizes = form_of(7).batch(memoryview(encode_client_batch(elements)), BORN)
    assert run.tobytes() == b"".join(expected)
    assert sizes == [len(one) for one in expected]


def form() -> RecordForm:
    return RecordForm(check_of(), b"T", 0, sys_flag=0, flag=0, born_host=HOSTS[0])


def test_open_properties_of_a_batch_are_closed() -> None:
    batch = encode_client_batch([BatchElement(b"x", b"K\x01v"), BatchElement(b"y", b"K\x01v\x02"), BatchElement(b"z")])
    run, sizes = form().batch(batch, BORN)
    closed = form().record(b"x", b"K\x01v\x02", BORN)
    assert run.tobytes() == closed + form().record(b"y", b"K\x01v\x02", BORN) + form().record(b"z", b"", BORN)
    assert sizes[0] == sizes[1] == len(closed)


GOOD = encode_client_batch([BatchElement(b"body", b"K\x01v\x02")])


def changed(at: int, value: bytes) -> bytes:
    return GOOD + GOOD[:at] + value + GOOD[at + len(value) :]


WRONG = {
    "nothing": (b"", "the batch is empty"),
    "cut": (GOOD + GOOD[:21], "message 1 of the batch, at byte 30: its size or the sizes inside point past the end"),
    "too long": (changed(0, b"\0\0\0\x1f"), "point past the end"),
    "too short": (changed(0, b"\0\0\0\x15"), "point past the end"),
    "negative": (changed(0, b"\xff\xff\xff\xff"), "point past the end"),
    "body": (changed(16, b"\0\0\0\x09"), "do not add up"),
    "negative body": (changed(16, b"\x80\0\0\0"), "do not add up"),
    "properties": (changed(24, b"\0\x05"), "do not add up"),
    "great body": (encode_client_batch([BatchElement(bytes(MOST + 1))]), "larger than commit_log.max_message_bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_is_refused(name: str) -> None:
    data, sentence = WRONG[name]
    with pytest.raises(MessageIllegalError, match=sentence):
        form().batch(data, BORN)


def test_sizes_over_the_limits_are_refused() -> None:
    longest = b"K\x01" + bytes(MAX_PROPERTIES_BYTES - 3).replace(b"\0", b"v") + b"\x02"
    assert len(form().record(b"", longest, BORN)) > MAX_PROPERTIES_BYTES
    with pytest.raises(MessageIllegalError, match="32768 bytes, at most 32767"):
        form().record(b"", longest + b"\x02", BORN)
    with pytest.raises(MessageIllegalError, match=f"the body has {MOST + 1} bytes"):
        form().record(bytes(MOST + 1), b"", BORN)
    with pytest.raises(MessageIllegalError, match="properties are longer than 32767"):
        form().batch(encode_client_batch([BatchElement(b"", longest[:-1] + b"v")]), BORN)


def test_no_bytes_make_a_batch_be_read_behind_its_end() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    memory = mmap.mmap(-1, mmap.PAGESIZE)  # a read behind it ends the process
    whole = encode_client_batch([BatchElement(b"body" * 9, b"K\x01v\x02", 3) for _ in range(8)])
    for _ in range(2_000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
        memory[-len(data) :] = bytes(data)
        view = memoryview(memory)[-len(data) :]
        try:
            run, sizes = form().batch(view, BORN)
        except MessageIllegalError:
            with pytest.raises((CorruptRecordError, AssertionError)):
                assert all(len(one.body) <= MOST for one in decode_client_batch(bytes(data)))
        else:
            assert sum(sizes) == run.size
            assert len(sizes) == len(decode_client_batch(bytes(data)))
