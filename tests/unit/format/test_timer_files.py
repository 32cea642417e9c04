"""Goal: slots of the wheel, units of the timer log and the file timercheck have RocketMQ's bytes.

Method: the golden store's files are decoded and encoded again; round trips over generated values; damage to a unit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import CorruptRecordError, StoreError
from commitmq.format import timer
from commitmq.format.timer import (
    Slot,
    TimerCheck,
    TimerFiller,
    TimerUnit,
    decode_check,
    decode_slot,
    decode_unit,
    encode_check,
    encode_slot,
    encode_unit,
)
from golden_stores import unpack
from record_strategies import INT32, INT64

MAGICS = st.sampled_from([1, 3, 5, 7])
UNITS = st.builds(TimerUnit, INT64, MAGICS, INT64, INT32, INT64, INT32, INT32)
SAMPLE = TimerUnit(104, 7, 1_795_339_323_000, 12_000, 8_170, 378, -261_726_663)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("semantics", tmp_path_factory.mktemp("semantics")).root


def test_the_golden_timer_log_is_units_fillers_and_zeros(root: Path) -> None:
    kinds = []
    for path in sorted((root / "timerlog").iterdir()):
        data = path.read_bytes()
        rebuilt, offset = b"", 0
        while offset < len(data):
            found = decode_unit(data, offset)
            kinds.append(type(found).__name__)
            if isinstance(found, TimerUnit):
                assert timer.fits(int(path.name) + offset, len(data))
                rebuilt += encode_unit(found)
                offset += timer.UNIT_BYTES
            elif isinstance(found, TimerFiller):
                assert offset + found.blank_bytes == len(data)
                assert not timer.fits(offset, len(data))
                rebuilt += timer.encode_filler(found.blank_bytes)
                break
            else:
                break
        assert rebuilt.ljust(len(data), b"\0") == data
    assert (kinds.count("TimerUnit"), kinds.count("TimerFiller"), kinds.count("NoneType")) == (88, 4, 1)


def test_the_golden_wheel_has_slots_of_32_bytes(root: Path) -> None:
    data = (root / "timerwheel").read_bytes()
    assert len(data) == timer.WHEEL_BYTES
    used = [index for index in range(timer.SLOTS) if any(data[index * 32 : index * 32 + 32])]
    assert len(used) == 36
    for index in used:
        slot = decode_slot(data, index)
        assert encode_slot(slot) == data[index * 32 : index * 32 + 32]
        assert slot.time % timer.SLOTS == index
        assert slot.magic == 0
    assert decode_slot(data, 0) == Slot(0, 0, 0, 0)


def test_the_golden_timercheck(root: Path) -> None:
    data = (root / "config" / "timercheck").read_bytes()
    check = decode_check(data)
    assert check == TimerCheck(1_795_339_432_000, 4_784, 88, 88, 0, 1_795_339_432_140, 95)
    assert encode_check(check) == data
    assert len(data) == timer.FILE_BYTES


def test_a_short_timercheck_is_refused() -> None:
    with pytest.raises(StoreError, match="55 bytes"):
        decode_check(bytes(55))


@given(UNITS, st.binary(max_size=9))
def test_a_unit_comes_back_from_its_bytes(unit: TimerUnit, before: bytes) -> None:
    data = encode_unit(unit)
    assert len(data) == timer.UNIT_BYTES
    assert decode_unit(before + data, len(before)) == unit


@given(st.builds(Slot, INT64, INT64, INT64, INT32, INT32))
def test_a_slot_comes_back_from_its_bytes(slot: Slot) -> None:
    assert decode_slot(bytes(32) + encode_slot(slot), 1) == slot


@given(st.builds(TimerCheck, *[INT64] * 7))
def test_a_timercheck_comes_back_from_its_bytes(check: TimerCheck) -> None:
    assert decode_check(encode_check(check)) == check


def test_a_slot_outside_the_wheel_is_refused() -> None:
    with pytest.raises(StoreError, match="no slot 2"):
        decode_slot(bytes(64), 2)


@pytest.mark.parametrize(("offset", "value"), [(3, 51), (0, 1), (15, 2), (15, 17), (12, 0x80)])
def test_what_is_no_unit_is_corruption(offset: int, value: int) -> None:
    data = bytearray(b"xx" + encode_unit(SAMPLE))
    data[2 + offset] = value
    with pytest.raises(CorruptRecordError) as caught:
        decode_unit(data, 2)
    assert caught.value.offset == 2


def test_a_torn_unit_is_corruption_and_zeros_are_the_end() -> None:
    assert decode_unit(bytes(52)) is None
    assert decode_unit(b"") is None
    with pytest.raises(CorruptRecordError, match="20 bytes are left"):
        decode_unit(encode_unit(SAMPLE)[:20])
    with pytest.raises(CorruptRecordError, match="claims 3 bytes"):
        decode_unit(timer.encode_filler(3))


def test_a_file_ends_where_a_unit_and_a_filler_no_longer_fit() -> None:
    # Files of 20 units: the 20th place has no room for the filler behind a unit.
    assert [timer.fits(52 * index, 1_040) for index in (0, 18, 19)] == [True, True, False]
    assert timer.place_of_next(18 * 52, 1_040) == 18 * 52
    assert timer.place_of_next(19 * 52, 1_040) == 1_040
    assert timer.place_of_next(1_040 + 19 * 52, 1_040) == 2_080
    assert timer.last_unit_offset(1_040) == 18 * 52
