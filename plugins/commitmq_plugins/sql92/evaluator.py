"""Judges messages by a parsed expression, a batch at a time: every part of the tree becomes an array of states.

A state is FALSE, TRUE, NULL or FAILED. NULL is SQL's unknown, and comes from properties that a message does not have.
FAILED stands for an exception in RocketMQ: a property that must be a number and is something else (``size > 10`` with
the value ``big``, but also ``5.5`` against an integer: write ``10.0`` to compare with decimals). The exception ends
RocketMQ's evaluation. So here FAILED wins over every later state in AND and OR, and over no earlier one. A message
matches when the whole expression is TRUE.

The rules are exactly RocketMQ's, because a subscription must select the same messages on both. Some of them surprise:
``5 = a`` without ``a`` is FALSE although ``a = 5`` is NULL; two missing properties are equal; ``TRUE = a`` fails
although ``a = TRUE`` reads the property as a truth value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.store.queues.message_filter import (
    INTEGER_RANGE,
    LONG_RANGE,
    FilterBatch,
    Flags,
    PropertyColumn,
    java_double,
    java_integer,
)
from commitmq_plugins.sql92 import parser
from commitmq_plugins.sql92.parser import parse

States = NDArray[np.int8]
FALSE: Final = 0
TRUE: Final = 1
NULL: Final = 2
FAILED: Final = 3

# Row: the state so far. Column: the next operand's state.
_AND: Final = np.array([[0, 0, 0, 0], [0, 1, 2, 3], [0, 2, 2, 3], [3, 3, 3, 3]], np.int8)
_OR: Final = np.array([[0, 1, 2, 3], [1, 1, 1, 1], [2, 1, 2, 3], [3, 3, 3, 3]], np.int8)
_NOT: Final = np.array([1, 0, 2, 3], np.int8)
_GREATEST_KEY: Final = np.iinfo(np.int64).max


class SqlFilter:
    """The filter type SQL92; see :class:`commitmq.plugin.hookspecs.MessageFilter`."""

    def compile(self, expression: str) -> CompiledSql:
        """Raises FilterError with position and reason."""
        return CompiledSql(parse(expression))


class CompiledSql:
    """One expression; see :class:`commitmq.plugin.hookspecs.CompiledFilter`."""

    def __init__(self, node: parser.Node) -> None:
        self._node = node
        self.properties = tuple(parser.properties(node))
        self.terms = parser.terms(node)

    def matches(self, batch: FilterBatch) -> Flags:
        """For each message, whether the expression is TRUE."""
        value = _value(self._node, batch)
        states = value if isinstance(value, np.ndarray) else _spread(_as_state(value), len(batch))
        return np.asarray(states == TRUE, np.bool_)


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A constant. ``is_long``: an integer that Java holds in 64 bits, so that texts are read as such for a comparison."""

    value: parser.Constant
    is_long: bool = False


_Value = _Scalar | PropertyColumn | States
_MISSING: Final = _Scalar(None)


def _value(node: parser.Node, batch: FilterBatch) -> _Value:
    match node:
        case parser.Literal(value):
            is_long = type(value) is int and not INTEGER_RANGE[0] <= value <= INTEGER_RANGE[1]
            return _Scalar(value, is_long)
        case parser.PropertyExpression(name):
            return batch[name]
        case parser.Negative(operand):
            return _negative(_value(operand, batch))
        case parser.AsBoolean(operand):
            return np.where(batch[operand.name].present, FALSE, NULL).astype(np.int8)
        case _:
            return _states(node, batch)


def _negative(value: _Value) -> _Value:
    if isinstance(value, np.ndarray):
        return np.where(value == FAILED, FAILED, NULL).astype(np.int8)
    if isinstance(value, _Scalar) and isinstance(value.value, int | float) and not isinstance(value.value, bool):
        return _Scalar(-value.value, value.is_long)
    return _MISSING


def _states(node: parser.Node, batch: FilterBatch) -> States:
    """The states of a part that has truth values."""
    count = len(batch)
    match node:
        case parser.And(operands):
            return _fold(_AND, operands, batch)
        case parser.Or(operands):
            return _fold(_OR, operands, batch)
        case parser.Not(operand):
            found: States = _NOT[_states(operand, batch)]
            return found
        case parser.Equal(left, right):
            return _equal(_value(left, batch), _value(right, batch), count)
        case parser.IsNull(operand):
            return _equal(_value(operand, batch), _MISSING, count)
        case parser.Order(symbol, left, right):
            return _order(symbol, _value(left, batch), _value(right, batch), count)
        case parser.In(operand, texts, negated):
            column = batch[operand.name]
            return _known(column.equals_any(texts) != negated, column.present)
        case parser.TextTest(how, operand, text, negated):
            return _text_test(how, _value(operand, batch), text, negated, count)
        case _:
            value = _value(node, batch)
            return value if isinstance(value, np.ndarray) else _spread(_as_state(value), count)


def _fold(table: States, operands: tuple[parser.Node, ...], batch: FilterBatch) -> States:
    states = _states(operands[0], batch)
    # FALSE decides AND, TRUE decides OR; a failure decides both.
    decided = FALSE if table is _AND else TRUE
    for operand in operands[1:]:
        if ((states == decided) | (states == FAILED)).all():
            break
        states = table[states, _states(operand, batch)]
    return states


def _as_state(value: _Value) -> int:
    assert isinstance(value, _Scalar)
    return NULL if value.value is None else int(value.value is True)


def _spread(state: int, count: int) -> States:
    return np.full(count, state, np.int8)


def _known(found: Flags, present: Flags) -> States:
    """TRUE or FALSE as ``found`` says, NULL where the property is not ``present``."""
    return np.where(present, found, NULL).astype(np.int8)


# ---------------------------------------------------------------- equality


def _equal(left: _Value, right: _Value, count: int) -> States:
    """``left = right``. Unknown on the left is NULL, on the right alone FALSE, on both sides TRUE."""
    left_null, right_null = _nulls(left, count), _nulls(right, count)
    states = _equal_present(left, right, count)
    states = np.where(right_null, FALSE, states)
    states = np.where(left_null, np.where(right_null, TRUE, NULL), states)
    # Both sides are always evaluated, so a failure inside either wins.
    return np.where(_failures(left) | _failures(right), FAILED, states).astype(np.int8)


def _nulls(value: _Value, count: int) -> Flags:
    if isinstance(value, PropertyColumn):
        return ~value.present
    if isinstance(value, _Scalar):
        return np.full(count, value.value is None)
    return np.asarray(value == NULL, np.bool_)


def _failures(value: _Value) -> Any:
    return value == FAILED if isinstance(value, np.ndarray) else False


def _equal_present(left: _Value, right: _Value, count: int) -> States:
    """Equality when both sides are known; the result for other messages does not count."""
    if isinstance(left, PropertyColumn):
        return _column_equals(left, right, turned=False)
    if isinstance(right, PropertyColumn):
        return _column_equals(right, left, turned=True)
    if isinstance(left, _Scalar) and isinstance(right, _Scalar):
        return _spread(_constants_equal(left, right), count)
    if isinstance(left, np.ndarray):
        if isinstance(right, np.ndarray):
            return _flags(left == right)
        # Java casts the truth value to a string to compare it with one, which throws.
        return _spread(FAILED, count) if isinstance(right.value, str) else _truth_is(left, right.value)
    assert isinstance(right, np.ndarray)
    return _truth_is(right, left.value.lower() == "true" if isinstance(left.value, str) else left.value)


def _truth_is(states: States, value: parser.Constant) -> States:
    """TRUE for messages whose state equals ``value``; a truth value equals no number."""
    return _flags(states == int(value)) if isinstance(value, bool) else np.zeros_like(states)


def _flags(found: Any) -> States:
    return np.asarray(found, np.int8)


def _column_equals(column: PropertyColumn, other: _Value, *, turned: bool) -> States:
    """Equality of a property and another value; ``turned``: the property is on the right."""
    if isinstance(other, PropertyColumn):
        return _flags(column.equals(other))
    if isinstance(other, np.ndarray) or isinstance(other.value, bool):
        if turned:  # the same cast
            return _spread(FAILED, len(column))
        truth = _reads_true(column)
        wanted = other == TRUE if isinstance(other, np.ndarray) else other.value
        return np.asarray(truth == wanted, np.int8)
    if isinstance(other.value, str):
        return _flags(column.equals_any([other.value]))
    if other.value is None:
        return _spread(FALSE, len(column))
    comparison, valid = _against_number(column, other)
    return np.where(valid, comparison == 0, FAILED).astype(np.int8)


def _reads_true(column: PropertyColumn) -> Flags:
    """Whether the value is "true" in upper or lower case."""
    short = np.flatnonzero(column.lengths == len("true")).tolist()
    found = np.zeros(len(column), np.bool_)
    for index in short:
        found[index] = (column.value(index) or "").lower() == "true"
    return found


def _constants_equal(left: _Scalar, right: _Scalar) -> int:
    one, other = left.value, right.value
    if one is None or other is None:
        return FALSE
    if type(one) is type(other):
        return int(_sign(one, other) == 0)
    if isinstance(one, str):
        if isinstance(other, bool):
            return int((one.lower() == "true") == other)
        number = _read(one, right)
        return FAILED if number is None else int(_sign(number, other) == 0)
    if isinstance(other, str):
        if isinstance(one, bool):
            return FAILED
        number = _read(other, left)
        return FAILED if number is None else int(_sign(one, number) == 0)
    if isinstance(one, bool) or isinstance(other, bool):
        return FALSE
    return int(_sign(float(one), float(other)) == 0)


# ---------------------------------------------------------------- order


def _order(symbol: str, left: _Value, right: _Value, count: int) -> States:
    """``left symbol right``: unknown on a side is NULL; the right side is not evaluated after an unknown left."""
    comparison, valid = _compare(left, right, count)
    match symbol:
        case "<":
            holds = comparison < 0
        case "<=":
            holds = comparison <= 0
        case ">":
            holds = comparison > 0
        case _:
            holds = comparison >= 0
    states = np.where(valid, holds, FAILED)
    states = np.where(_nulls(right, count), NULL, states)
    states = np.where(_failures(right), FAILED, states)
    states = np.where(_nulls(left, count), NULL, states)
    return np.where(_failures(left), FAILED, states).astype(np.int8)


def _compare(left: _Value, right: _Value, count: int) -> tuple[NDArray[np.int8], Flags]:
    """Signs of left - right when both are known, and whether the comparison was possible."""
    if isinstance(left, PropertyColumn) and isinstance(right, PropertyColumn):
        one, one_valid = left.decimal_numbers()
        other, other_valid = right.decimal_numbers()
        return _signs(_order_keys(one), _order_keys(other)), one_valid & other_valid
    if isinstance(left, PropertyColumn) and isinstance(right, _Scalar) and right.value is not None:
        return _against_number(left, right)
    if isinstance(right, PropertyColumn) and isinstance(left, _Scalar) and left.value is not None:
        comparison, valid = _against_number(right, left)
        return -comparison, valid
    sign = 0
    if isinstance(left, _Scalar) and isinstance(right, _Scalar) and left.value is not None and right.value is not None:
        sign = _sign(left.value, right.value)
    return np.full(count, sign, np.int8), np.ones(count, np.bool_)


def _against_number(column: PropertyColumn, number: _Scalar) -> tuple[NDArray[np.int8], Flags]:
    """Signs of column - number, and whether the value is a number of that kind."""
    value = number.value
    if isinstance(value, float):
        decimals, valid = column.decimal_numbers()
        return _signs(_order_keys(decimals), _order_keys(np.array([value]))), valid
    assert isinstance(value, int)
    wholes, valid = column.whole_numbers(LONG_RANGE if number.is_long else INTEGER_RANGE)
    return _signs(wholes, np.array([value], np.int64)), valid


def _signs(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int8]:
    return (left > right).astype(np.int8) - (left < right).astype(np.int8)


def _order_keys(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Integers in the order of Java's doubles: -0.0 below 0.0, NaN equal to itself and above everything."""
    bits = values.view(np.int64)
    keys = np.where(bits < 0, bits ^ np.int64(_GREATEST_KEY), bits)
    return np.where(np.isnan(values), np.int64(_GREATEST_KEY), keys)


def _sign(left: Any, right: Any) -> int:
    """Sign of left - right for two constants of one type, or two numbers."""
    if isinstance(left, float) or isinstance(right, float):
        one, other = (_order_keys(np.array([float(value)]))[0] for value in (left, right))
        return int(one > other) - int(one < other)
    return int(left > right) - int(left < right)


def _read(text: str, number: _Scalar) -> int | float | None:
    """``text`` as a number of the same kind as ``number``."""
    if isinstance(number.value, float):
        return java_double(text)
    return java_integer(text, LONG_RANGE if number.is_long else INTEGER_RANGE)


# ---------------------------------------------------------------- texts


def _text_test(how: str, value: _Value, text: str, negated: bool, count: int) -> States:
    """FALSE, negated or not, for an empty ``text`` and for a value that is no string."""
    failed = _failures(value) if text else False
    if not text or not isinstance(value, PropertyColumn | _Scalar):
        return np.where(failed, FAILED, _spread(FALSE, count)).astype(np.int8)
    if isinstance(value, _Scalar):
        if not isinstance(value.value, str):
            return _spread(FALSE, count)
        tests = {"CONTAINS": value.value.__contains__, "STARTSWITH": value.value.startswith}
        return _spread(int(tests.get(how, value.value.endswith)(text) != negated), count)
    if how == "CONTAINS":
        found = value.contains(text)
    elif how == "STARTSWITH":
        found = value.starts_with(text)
    else:
        found = value.ends_with(text)
    return np.asarray((found != negated) & value.present, np.int8)
