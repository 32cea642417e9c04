"""Goal: a record that waits, and the one that is delivered, have the bytes that RocketMQ's broker writes.

Method: from RocketMQ's own SCHEDULE records (golden stores) the client's message is made again, its properties in a
random order, and readdressed: the result is RocketMQ's record but for the fields that the writer fills in. The record
that RocketMQ delivered later is made from the one that waited. Random properties, with Java's own rule as the model.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.format.java import java_string_hash
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.derived import java_order
from commitmq.store.log.readdressing import NewAddress, find, readdress
from commitmq.store.log.run_check import MessageIllegalError
from golden_stores import unpack

_HEAD = 88  # of a record with IPv4 hosts: everything before the body
_MAGICS = (0xDAA320A7, 0xDAA320AB)


def records(commit_log: Path) -> Iterator[bytes]:
    for path in sorted(commit_log.iterdir()):
        data, at = path.read_bytes(), 0
        while at + 8 <= len(data):
            size, magic = struct.unpack_from(">iI", data, at)
            if size < 8 or (magic not in _MAGICS and magic != 0xCBD43194):
                break
            if magic in _MAGICS:
                yield data[at : at + size]
            at += size


def split(record: bytes) -> tuple[str, list[tuple[str, str]], int]:
    """Topic, properties, and where the topic's length stands."""
    at = _HEAD + struct.unpack_from(">i", record, _HEAD - 4)[0]
    size = record[at]
    topic = record[at + 1 : at + 1 + size].decode()
    text = record[at + 3 + size :].decode()
    pairs = [tuple(pair.split("\x01", 1)) for pair in text.split("\x02") if pair]
    return topic, [(name, value) for name, value in pairs], at


def joined(pairs: list[tuple[str, str]]) -> bytes:
    return "".join(f"{name}\x01{value}\x02" for name, value in pairs).encode()


def rebuilt(record: bytes, topic: str, queue: int, pairs: list[tuple[str, str]]) -> bytes:
    """``record`` with another topic, queue and properties, and zeros where the writer fills in."""
    at = split(record)[2]
    name, text = topic.encode(), joined(pairs)
    data = bytearray(record[:at] + bytes([len(name)]) + name + len(text).to_bytes(2, "big") + text)
    struct.pack_into(">i", data, 0, len(data))
    struct.pack_into(">i", data, 12, queue)
    return blank(bytes(data))


def blank(record: bytes) -> bytes:
    """Zeros in queue offset, physical offset, store time, store host and prepared offset."""
    data = bytearray(record)
    data[20:36] = bytes(16)
    data[56:72] = bytes(16)
    data[76:84] = bytes(8)
    return bytes(data)


def shuffled(pairs: list[tuple[str, str]], chooser: random.Random) -> list[tuple[str, str]]:
    """Another order in which the names that share a bucket of Java's table keep theirs."""
    groups: dict[int, list[tuple[str, str]]] = {}
    for pair in pairs:
        value = java_string_hash(pair[0]) & 0xFFFFFFFF
        groups.setdefault((value ^ (value >> 16)) & 127, []).append(pair)
    order = list(groups.values())
    chooser.shuffle(order)
    return [pair for group in order for pair in group]


def as_array(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


@pytest.fixture(scope="module", params=["clean", "semantics"])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return list(records(unpack(request.param, tmp_path_factory.mktemp("golden")).layout.commit_log))


ONE = np.zeros(1, np.int64)


def test_a_delayed_message_waits_in_rocketmqs_bytes(golden: list[bytes]) -> None:
    chooser, seen = random.Random(7), 0
    for record in golden:
        topic, pairs, _ = split(record)
        if topic != SCHEDULE_TOPIC:
            continue
        real = dict(pairs)
        sent = [pair for pair in pairs if pair[0] not in ("REAL_TOPIC", "REAL_QID")]
        sent = shuffled(sent, chooser)
        source = rebuilt(record, real["REAL_TOPIC"], int(real["REAL_QID"]), sent)
        more = joined([("REAL_TOPIC", real["REAL_TOPIC"]), ("REAL_QID", real["REAL_QID"])])
        target = NewAddress(SCHEDULE_TOPIC.encode(), int(real["DELAY"]) - 1, False, False)
        run = readdress(as_array(source), ONE, target, [more])
        assert run.data.tobytes() == blank(record)
        seen += 1
    assert seen >= 4


def test_a_delivered_message_has_rocketmqs_bytes(golden: list[bytes]) -> None:
    waiting = {}
    seen = 0
    for record in golden:
        topic, pairs, _ = split(record)
        named = dict(pairs)
        key = (named.get("UNIQ_KEY"), named.get("DELAY"), named.get("REAL_TOPIC"))
        if topic == SCHEDULE_TOPIC:
            waiting[key] = record
        elif topic == named.get("REAL_TOPIC") and key in waiting:
            target = NewAddress(topic.encode(), int(named["REAL_QID"]), False, False)
            run = readdress(as_array(waiting[key]), ONE, target)
            assert run.data.tobytes() == blank(record)
            seen += 1
    assert seen >= 4


NAMES = st.text(st.characters(exclude_characters="\x00\x01\x02", codec="utf-8"), min_size=1, max_size=6)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=40), st.lists(st.tuples(NAMES, NAMES), max_size=4), st.booleans())
def test_properties_come_in_javas_order(
    pairs: list[tuple[str, str]], more: list[tuple[str, str]], with_slot: bool
) -> None:
    name = b"real"
    slot = b"__CRC32#\x01" + b"0" * 10 + b"\x02" if with_slot else b""
    text = joined(pairs) + slot
    fixed = struct.pack(">iIiiiqqiq", 0, _MAGICS[0], 0, 3, 5, 0, 0, 0, 11) + bytes(8 + 8 + 8 + 4 + 8) + bytes(4)
    record = bytearray(fixed + bytes([len(name)]) + name + len(text).to_bytes(2, "big") + text)
    struct.pack_into(">i", record, 0, len(record))
    run = readdress(as_array(bytes(record)), ONE, NewAddress(b"other", 7, True, with_slot), [joined(more)])
    made = run.data.tobytes()
    assert int.from_bytes(made[:4], "big") == len(made) == run.ends[0]
    assert struct.unpack_from(">i", made, 12)[0] == 7
    assert int.from_bytes(made[36:40], "big") == 0x20  # the store host's layout is ours
    at = made.index(b"\x05other") + 8
    expected = joined(java_order([*pairs, *more])) + slot
    assert made[at:] == expected


def test_many_names_make_javas_table_grow() -> None:
    pairs = [(f"name-{number}", str(number)) for number in range(300)]
    text = joined(pairs)
    record = bytearray(struct.pack(">iIiiiqqiq", 0, _MAGICS[0], 0, 3, 5, 0, 0, 0, 11) + bytes(40) + b"\x01t")
    record += len(text).to_bytes(2, "big") + text
    struct.pack_into(">i", record, 0, len(record))
    made = readdress(as_array(bytes(record)), ONE, NewAddress(b"t", 0, False, False), [b""]).data.tobytes()
    assert made.endswith(joined(java_order(pairs)))
    many = joined([(f"n{number}", "v") for number in range(513)])
    record = bytearray(struct.pack(">iIiiiqqiq", 0, _MAGICS[0], 0, 3, 5, 0, 0, 0, 11) + bytes(40) + b"\x01t")
    record += len(many).to_bytes(2, "big") + many
    struct.pack_into(">i", record, 0, len(record))
    with pytest.raises(MessageIllegalError, match="more than 512 properties"):
        readdress(as_array(bytes(record)), ONE, NewAddress(b"t", 0, False, False), [b""])


def test_records_that_agree_in_properties_are_found(golden: list[bytes]) -> None:
    data = as_array(b"".join(golden))
    sizes = np.array([len(record) for record in golden], np.int64)
    starts = np.cumsum(sizes) - sizes
    found = find(data, starts, sizes, ["KEYS", "REAL_TOPIC"])
    named = [dict(split(record)[1]) for record in golden]
    expected = [(one.get("KEYS", ""), one.get("REAL_TOPIC", "")) for one in named]
    assert [(found.value(0, at).decode(), found.value(1, at).decode()) for at in range(len(golden))] == expected
    assert found.whole.all()
    numbers, firsts = found.alike()
    order = list(dict.fromkeys(expected))
    assert [expected[first] for first in firsts] == order
    assert [order[number] for number in numbers.tolist()] == expected
