"""Goal: SQL92 filters select exactly the messages that spec 12.7 says, and refuse wrong expressions with a position.

Method: a table for every rule; random expressions and properties against a second evaluator (sql_cases.py), which in
turn is held to RocketMQ's own classes by tests/interop/test_sql_filters.py. Failures of random tests name their seed.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commitmq.errors import FilterError
from commitmq.format.record import Record, encode_record
from commitmq.store.queues import message_filter
from commitmq.store.queues.message_filter import INTEGER_RANGE, FilterBatch
from commitmq_plugins.sql92.evaluator import SqlFilter
from commitmq_plugins.sql92.parser import MAX_DEPTH, MAX_EXPRESSION_CHARACTERS, parse
from sql_cases import VALUES, Failed, broken, expression, java_double, matches, properties

MESSAGE = {"a": "5", "s": "abc", "f": "5.5", "t": "true", "TAGS": "food", "KEYS": "k1 k2", "q": "it's"}


def batch_of(messages: list[dict[str, str]], names: tuple[str, ...]) -> FilterBatch:
    records = [encode_record(Record("t", body=b"body", properties=one)) for one in messages]
    sizes = np.array([len(one) for one in records], np.int64)
    positions = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
    return FilterBatch(np.frombuffer(b"".join(records), np.uint8), positions, sizes, names)


def select(text: str, messages: list[dict[str, str]]) -> list[bool]:
    """Which of ``messages`` the expression selects."""
    compiled = SqlFilter().compile(text)
    found: list[bool] = compiled.matches(batch_of(messages, compiled.properties)).tolist()
    return found


TRUE_FOR_MESSAGE = [
    "a = 5", "a=5", "a = 5L", "a = 5.0", "a = '5'", "5 = a", "a <> 4", "a > 4", "a >= 5", "a < 6", "a <= 5", "4 < a", "a = +5",
    "a > -5", "a = -(-5)", "a BETWEEN 5 AND 6", "a NOT BETWEEN 6 AND 7", "a between 4.5 and 5.5", "f > 5.0", "a < f", "a <= a",
    "s = 'abc'", "s <> 'abd'", "s IN ('x', 'abc')", "s NOT IN ('x')", "(s) IN ('abc')", "q = 'it''s'", "s CONTAINS 'b'",
    "s STARTSWITH 'ab'", "s ENDSWITH 'bc'", "s NOT CONTAINS 'x'", "s not startswith 'b'", "s Not EndsWith 'b'",
    "t = TRUE", "TRUE", "NOT FALSE", "NOT (a = 4)", "NOT NOT (a = 5)", "(a = 5) = TRUE", "t = (a = 5)", "a = 4 OR s = 'abc'",
    "missing IS NULL", "a IS NOT NULL", "(missing = 5) IS NULL", "missing = missing", "5 <> missing", "a <> missing",
    "TAGS = 'food'", "KEYS CONTAINS 'k2'", "a = 5 AND s = 'abc' AND NOT (t = FALSE)", "a = 4 AND s = 'abc' OR t = TRUE",
    "a = 5 -- a remark\n AND s = 'abc'", "a = 5 -- a remark", "a /* is ** five */ = 5", "a = 5 OR s > 5", "a > 0.0",
    "NULL OR a = 5", "'5' = 5", "5 = 5.0",
]  # fmt: skip
NOT_TRUE_FOR_MESSAGE = [
    "a = 4", "a <> 5", "missing = 5", "missing <> 5", "NOT (missing = 5)", "missing > 5", "missing IN ('x')",
    "missing NOT IN ('x')", "missing CONTAINS 'x'", "missing NOT CONTAINS 'x'", "s CONTAINS ''", "s NOT CONTAINS ''", "NULL",
    "NOT NULL", "FALSE", "a", "NOT a = 5", "-a = -5", "s = 'ABC'", "S = 'abc'", "missing = a", "5 = TRUE",
    # No such number: whatever else the expression says, the message is not selected.
    "s > 5", "NOT (s > 5)", "f > 5", "f = 5", "s > 5 OR a = 5", "a > s", "TRUE = t", "a = 5 AND (s > 5 OR TRUE)",
    "a = 99999999999", "(a = 5) = 'true'", "'abc' = 5",
]  # fmt: skip


@pytest.mark.parametrize("text", TRUE_FOR_MESSAGE)
def test_selected(text: str) -> None:
    assert select(text, [MESSAGE]) == [True]


@pytest.mark.parametrize("text", NOT_TRUE_FOR_MESSAGE)
def test_not_selected(text: str) -> None:
    assert select(text, [MESSAGE]) == [False]


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("", 1, "the expression ends"),
        ("   ", 4, "the expression ends"),
        ("a = 1 AND", 10, "the expression ends"),
        ("a = 1 b = 2", 7, "nothing may follow"),
        ("a + 1 = 2", 3, "nothing may follow"),
        ("a = 05", 6, "nothing may follow"),
        ("a LIKE 'x%'", 3, "nothing may follow"),
        ("a != 1", 3, "unequal is <>"),
        ('a = "x"', 5, "single quotes"),
        ("a = 'x", 5, "no closing quote"),
        ("a = 1 /* x", 7, "no closing"),
        ("(a = 1", 7, ") is missing"),
        ("a = 1)", 6, "nothing may follow"),
        ("a IN ()", 7, "a string"),
        ("a IN (1)", 7, "a string"),
        ("a IN ('x'", 10, ") or ,"),
        ("'x' IN ('x')", 1, "only a property"),
        ("a IS 5", 6, "NULL is missing"),
        ("a NOT 5", 7, "after NOT"),
        ("a CONTAINS b", 12, "a string"),
        ("a > 'x'", 5, "only numbers"),
        ("a > TRUE", 5, "only numbers"),
        ("NOT a > 5", 1, "only numbers"),
        ("a BETWEEN 'a' AND 'b'", 11, "only numbers"),
        ("a BETWEEN 7 AND 5", 11, "lesser value first"),
        ("a = NULL", 5, "write IS NULL"),
        ("TRUE = 5", 8, "cannot be compared"),
        ("5", 1, "no truth value"),
        ("a = 1 OR 'x'", 10, "no truth value"),
        ("NOT 5", 5, "no truth value"),
        ("a > 9223372036854775808", 5, "64 bits"),
        ("a > 1e999", 5, "double"),
        ("a > 1e-999", 5, "double"),
        ("größe > 1", 3, "'ö'"),
        ("between = 5", 1, "a property"),
    ],
)
def test_refused(text: str, position: int, reason: str) -> None:
    with pytest.raises(FilterError) as refusal:
        parse(text)
    assert refusal.value.position == position
    assert reason in str(refusal.value)


def test_limits() -> None:
    """A hostile expression costs a refusal, never the stack; long chains that are no nesting are fine."""
    with pytest.raises(FilterError, match="characters"):
        parse("a = 1 " + " " * MAX_EXPRESSION_CHARACTERS)
    for opening, closing in (("(", ")"), ("NOT ", ""), ("- ", ""), ("NOT(", ")"), ("a = (", ")")):
        with pytest.raises(FilterError, match="nested"):
            parse(opening * (MAX_DEPTH + 1) + "a = 1" + closing * (MAX_DEPTH + 1))
    for chain in (" IS NULL", " CONTAINS 'x'", " = a"):
        with pytest.raises(FilterError, match="nested"):
            parse("a = 1" + chain * (MAX_DEPTH + 1))
    assert select("(" * 90 + "a = 5" + ")" * 90, [MESSAGE]) == [True]
    assert select(" AND ".join(["a = 5"] * 1_500), [MESSAGE]) == [True]
    assert select(" OR ".join(["a = 6"] * 1_500 + ["a = 5"]), [MESSAGE]) == [True]
    assert select(f"s IN ({', '.join(repr(f'v{number}') for number in range(1_500))}, 'abc')", [MESSAGE]) == [True]


@pytest.mark.parametrize("seed", range(40))
def test_random_expressions_against_the_plain_evaluator(seed: int) -> None:
    rng = random.Random(seed)
    checked = 0
    for _ in range(50):
        text = expression(rng)
        messages = [properties(rng) for _ in range(rng.randint(1, 20))]
        try:
            node = parse(text)
        except FilterError:
            continue
        checked += 1
        assert select(text, messages) == [matches(node, one) for one in messages], (seed, text)
    assert checked > 10


@given(
    st.lists(
        st.one_of(st.sampled_from(VALUES), st.text("0123456789+-.eE", min_size=1), st.text(min_size=1)), min_size=1
    )
)
@example(["0E1000000000000000000", "1E1000000000000000000", "-1E-1000000000000000000", "0x1p-1000000000000000000"])
@settings(max_examples=400, deadline=None)
def test_numbers_are_read_as_java_reads_them(values: list[str]) -> None:
    values = [one for one in values if not {"\x00", "\x01", "\x02"} & set(one) and one.isprintable()] or ["0"]
    column = batch_of([{"n": one} for one in values], ("n",))["n"]
    decimals, valid = column.decimal_numbers()
    for text, value, is_number in zip(values, decimals.tolist(), valid.tolist(), strict=True):
        try:
            expected = java_double(text)
        except Failed:
            assert not is_number, text
            continue
        assert is_number, text
        assert repr(value) == repr(expected), text
    wholes, valid = column.whole_numbers(INTEGER_RANGE)
    for text, whole, is_number in zip(values, wholes.tolist(), valid.tolist(), strict=True):
        expected_whole = message_filter.java_integer(text, INTEGER_RANGE)
        assert is_number == (expected_whole is not None), text
        assert expected_whole is None or whole == expected_whole


@given(st.text(max_size=60))
@settings(max_examples=500, deadline=None)
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    try:
        parse(text)
    except FilterError as error:
        assert error.position is None or 1 <= error.position <= len(text) + 1


def test_broken_expressions_are_refused_or_parsed() -> None:
    seed = random.randrange(sys.maxsize)
    rng = random.Random(seed)
    refused = 0
    for _ in range(2_000):
        text = broken(rng)
        try:
            parse(text)
        except FilterError as error:
            refused += 1
            assert error.position is not None, (seed, text)
    assert refused > 500, seed
