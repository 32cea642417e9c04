"""The nodes of a parsed expression. ``is_boolean`` says which of them have truth values.

RocketMQ distinguishes three kinds of nodes, and so do the rules about comparisons: constants in the text, properties,
and everything composed of others. A negated number is of the third kind.
"""

from __future__ import annotations

from dataclasses import dataclass

Constant = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, a string, TRUE, FALSE or NULL. ``is_long`` as in Java: an integer outside 32 bits."""

    value: Constant


@dataclass(frozen=True, slots=True)
class Property:
    """A property of the message, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Negative:
    """``-operand``: a number if the operand is one, else NULL. A property is a string, so its negative is NULL."""

    operand: Node


@dataclass(frozen=True, slots=True)
class AsBoolean:
    """A property in the place of a truth value: FALSE when the message has it, because it is a string, else NULL."""

    operand: Property


@dataclass(frozen=True, slots=True)
class Not:
    operand: Node


@dataclass(frozen=True, slots=True)
class And:
    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Or:
    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Equal:
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Order:
    """``left symbol right``, symbol one of ``< <= > >=``."""

    symbol: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Node


@dataclass(frozen=True, slots=True)
class In:
    """``operand [NOT] IN (texts)``."""

    operand: Property
    texts: tuple[str, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class TextTest:
    """``operand [NOT] CONTAINS | STARTSWITH | ENDSWITH text``; FALSE for every value that is no string, negated or not."""

    how: str
    operand: Node
    text: str
    negated: bool


Node = Literal | Property | Negative | AsBoolean | Not | And | Or | Equal | Order | IsNull | In | TextTest

_BOOLEAN = (AsBoolean, Not, And, Or, Equal, Order, IsNull, In, TextTest)


def is_boolean(node: Node) -> bool:
    """Whether ``node`` has a truth value."""
    if isinstance(node, Literal):
        return node.value is None or isinstance(node.value, bool)
    return isinstance(node, _BOOLEAN)


def properties(node: Node) -> list[str]:
    """Names of the properties in ``node``, each once, in the order of their first use."""
    found: dict[str, None] = {}
    waiting: list[Node] = [node]
    while waiting:
        one = waiting.pop()
        match one:
            case Property(name):
                found[name] = None
            case And(operands) | Or(operands):
                waiting += reversed(operands)
            case Equal(left, right) | Order(_, left, right):
                waiting += [right, left]
            case Negative(operand) | AsBoolean(operand) | Not(operand) | IsNull(operand):
                waiting.append(operand)
            case In(operand, _, _) | TextTest(_, operand, _, _):
                waiting.append(operand)
            case Literal():
                pass
    return list(found)


# This many texts of an IN cost as much as one test.
_TEXTS_A_TERM = 16


def terms(node: Node) -> int:
    """The most tests that judging a message by ``node`` takes."""
    count = 0
    waiting: list[Node] = [node]
    while waiting:
        match waiting.pop():
            case And(operands) | Or(operands):
                waiting += operands
            case Not(operand) | Negative(operand) | IsNull(operand) | TextTest(_, operand, _, _):
                count += 1
                waiting.append(operand)
            case Equal(left, right) | Order(_, left, right):
                count += 1
                waiting += [left, right]
            case In(_, texts, _):
                count += 1 + len(texts) // _TEXTS_A_TERM
            case _:
                count += 1
    return count
