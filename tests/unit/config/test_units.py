"""Goal: sizes and times mean what people write. Method: round trips over random numbers, and a table of what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.config.schema import SIZES, TIMES, human, parse, parse_float, unit_of


@given(st.integers(0, 10**15), st.sampled_from(sorted(SIZES)))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str) -> None:
    for text in (f"{number}{unit}", f" {number} {unit.lower()} ", f"{number}{unit.upper()}"):
        assert parse(text, "bytes") == number * SIZES[unit]


@given(st.integers(0, 10**12), st.sampled_from(sorted(TIMES)))
def test_a_time_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse(f"{number}{unit}", "us") == number * TIMES[unit]
    assert parse(f"{number}{unit}", "ms") == number * TIMES[unit] // 1000 if TIMES[unit] >= 1000 else True


@given(st.integers(0, 1 << 60))
def test_what_is_shown_can_be_given_back(count: int) -> None:
    assert parse(human(count), "bytes") == count


@pytest.mark.parametrize("unit", ["bytes", "mib", "gib", "us", "ms", "s", "hours"])
def test_a_plain_number_counts_the_settings_own_unit(unit: str) -> None:
    assert parse("17", unit) == 17
    assert unit_of(f"some_{unit}") == unit


def test_names_without_a_unit_have_none() -> None:
    assert [unit_of(name) for name in ("count", "hash_slots", "delete_when", "host")] == ["", "", "", ""]


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1MiB", "1 2MiB", "1e3", "0x10", "1M", "1G", "1,5GB", "1MiB/s", "½GB", "nan"]
)
def test_what_is_no_size_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number of bytes, or one with a unit \(B, KB, MB, GB, TB, KiB"):
        parse(text, "bytes")


def test_parts_of_the_unit_are_refused_unless_asked_for() -> None:
    with pytest.raises(ValueError, match="no whole number of seconds"):
        parse("1500ms", "s")
    assert parse("1500ms", "ms") == 1500
    assert parse_float("1500ms", "s") == 1.5
    assert parse("0.5KiB", "bytes") == 512
    with pytest.raises(ValueError, match="no whole number of bytes"):
        parse("0.3B", "bytes")
