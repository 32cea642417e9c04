"""SQL92 expressions and properties made at random, and a second, plain evaluator of the expressions.

The evaluator here is written from the rules alone: one message at a time, Python values, exceptions where RocketMQ
throws. It shares nothing with the one under test but the parser's tree.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from commitmq_plugins.sql92 import parser

NAMES = ("a", "b", "price", "TAGS", "KEYS", "_x", "$y", "Not_There")
INTEGERS = ("0", "1", "5", "10", "5L", "7l", "2147483647", "2147483648", "9223372036854775807")
DECIMALS = ("5.0", "0.5", "5.", ".25", "1e3", "1E-3", "12.5e1", "4.9e-324", "1.7976931348623157e308")
STRINGS = ("'abc'", "'ab'", "'c'", "''", "'5'", "'5.0'", "'it''s'", "'true'", "'FALSE'", "'żółw'", "'🚀'", "' 5'")
VALUES = (
    "abc", "ab", "c", "5", "5.0", "0", "-0.0", "0.0", "1", "10", "it's", "true", "TRUE", "False", "żółw", "x🚀y", "🚀", " 5",
    "5 ", "+5", "-5", "--5", "+", "-", "2147483647", "2147483648", "-2147483648", "-2147483649", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "NaN", "Infinity", "-Infinity", "5d", "5.5F", "0x1p3", "0x.8P1f", "1e3",
    "1E400", "1e-400", ".5", "5.", ".", "1e", "1_000", "٣", "00000000000000000000000000005", "0.1", "0.30000000000000004",
    "123456789012345678901234567890", "\t5\r", "1,5", "5L", "infinity", "nan", "0x10", "-.5e-3", "9007199254740993",
)  # fmt: skip


class Failed(Exception):
    """Where RocketMQ throws while it evaluates."""


# ---------------------------------------------------------------- making cases


def properties(rng: random.Random) -> dict[str, str]:
    return {name: rng.choice(VALUES) for name in NAMES[:-1] if rng.random() < 0.7}


def expression(rng: random.Random, depth: int = 3) -> str:
    """An expression that is mostly well formed, in odd spellings."""
    return _spelled(rng, _or(rng, depth))


def broken(rng: random.Random) -> str:
    """An expression with some of its tokens lost, doubled, swapped or replaced."""
    words = re.findall(r"'(?:''|[^'])*'|[\w$.]+|<>|<=|>=|\S", expression(rng, 2))
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(words))
        match rng.randrange(4):
            case 0:
                words[at] = rng.choice(
                    ["", "AND", "NOT", "(", ")", "!", "NULL", "TRUE", "5", "'x'", "a", "IN", "=", "'"]
                )
            case 1:
                words.insert(at, words[at])
            case 2:
                del words[at]
                if not words:
                    return ""
            case _:
                other = rng.randrange(len(words))
                words[at], words[other] = words[other], words[at]
    return " ".join(words)


def _spelled(rng: random.Random, text: str) -> str:
    gaps = (" ", "  ", "\t", "\n", " /* x */ ", " /***/ ", " -- to the end\n")

    def gap(_: re.Match[str]) -> str:
        return rng.choice(gaps) if rng.random() < 0.1 else " "

    text = re.sub(r" (?=(?:[^']*'[^']*')*[^']*$)", gap, text)
    keywords = r"\b(NOT|AND|OR|BETWEEN|IN|TRUE|FALSE|NULL|IS|CONTAINS|STARTSWITH|ENDSWITH)\b(?=(?:[^']*'[^']*')*[^']*$)"
    return re.sub(keywords, lambda one: rng.choice([one[0], one[0].lower(), one[0].title()]), text)


def _or(rng: random.Random, depth: int) -> str:
    return " OR ".join(_and(rng, depth) for _ in range(rng.choice([1, 1, 2, 3])))


def _and(rng: random.Random, depth: int) -> str:
    return " AND ".join(_test(rng, depth) for _ in range(rng.choice([1, 1, 2])))


def _operand(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(NAMES)
    number = rng.choice(INTEGERS + DECIMALS)
    return rng.choice(["", "", "-", "+", "- + "]) + number


def _test(rng: random.Random, depth: int) -> str:
    if depth and rng.random() < 0.35:
        inner = f"({_or(rng, depth - 1)})"
        return rng.choice([inner, f"NOT {inner}", f"{inner} IS NULL", f"{inner} = {rng.choice(['TRUE', 'a', inner])}"])
    name = rng.choice(NAMES)
    no = rng.choice(["", "NOT "])
    match rng.randrange(9):
        case 0:
            other = rng.choice([*STRINGS, *INTEGERS, *DECIMALS, *NAMES, "TRUE", "FALSE"])
            pair = [rng.choice([name, name, _operand(rng), rng.choice(STRINGS), "TRUE"]), other]
            return f" {rng.choice(['=', '<>'])} ".join(pair if rng.random() < 0.7 else reversed(pair))
        case 1 | 2:
            return f"{_operand(rng)} {rng.choice(['<', '<=', '>', '>='])} {_operand(rng)}"
        case 3:
            return f"{name} IS {no}NULL"
        case 4:
            texts = rng.sample(STRINGS, rng.randint(1, 7))
            return f"{rng.choice([name, f'({name})'])} {no}IN ({', '.join(texts)})"
        case 5:
            low, high = _operand(rng), _operand(rng)
            return f"{_operand(rng)} {no}BETWEEN {low} AND {high}"
        case 6:
            left = rng.choice([name, name, name, "'abc'", "5", "-a"])
            return f"{left} {no}{rng.choice(['CONTAINS', 'STARTSWITH', 'ENDSWITH'])} {rng.choice(STRINGS)}"
        case 7:
            return rng.choice([name, f"NOT {name}", "TRUE", "NOT FALSE", "NULL"])
        case _:
            return f"{name} {rng.choice(['=', '>', '<='])} {rng.choice(INTEGERS + DECIMALS)}"


# ---------------------------------------------------------------- the plain evaluator


def evaluate(node: parser.Node, message: Mapping[str, str]) -> Any:
    """What ``node`` is for a message: a value, or None for NULL. Raises Failed."""
    match node:
        case parser.Literal(value):
            return value
        case parser.PropertyExpression(name):
            return message.get(name)
        case parser.Negative(operand):
            value = evaluate(operand, message)
            return -value if type(value) in (int, float, Long) else None
        case parser.AsBoolean(operand):
            return None if evaluate(operand, message) is None else False
        case parser.Not(operand):
            value = evaluate(operand, message)
            return None if value is None else not value
        case parser.And(operands) | parser.Or(operands):
            return _together(operands, message, decided=isinstance(node, parser.Or))
        case parser.Equal(left, right):
            return _equal(_typed(left, message), _typed(right, message))
        case parser.IsNull(operand):
            return evaluate(operand, message) is None
        case parser.Order(symbol, left, right):
            first = _typed(left, message)
            if first is None:
                return None
            second = _typed(right, message)
            if second is None:
                return None
            if isinstance(first, str) and isinstance(second, str):
                first, second = java_double(first), java_double(second)
            sign = _compare(first, second)
            return {"<": sign < 0, "<=": sign <= 0, ">": sign > 0, ">=": sign >= 0}[symbol]
        case parser.In(operand, texts, negated):
            value = evaluate(operand, message)
            return None if value is None else (value in texts) != negated
        case parser.TextTest(how, operand, text, negated):
            if not text:
                return False
            value = evaluate(operand, message)
            if not isinstance(value, str):
                return False
            holds = {"CONTAINS": text in value, "STARTSWITH": value.startswith(text), "ENDSWITH": value.endswith(text)}
            return holds[how] != negated
    raise AssertionError(node)


def matches(node: parser.Node, message: Mapping[str, str]) -> bool:
    try:
        return evaluate(node, message) is True
    except Failed:
        return False


class Long(int):
    """An integer that Java keeps in 64 bits."""

    def __neg__(self) -> Long:
        return Long(-int(self))


def _typed(node: parser.Node, message: Mapping[str, str]) -> Any:
    if isinstance(node, parser.Literal) and type(node.value) is int and not -(2**31) <= node.value < 2**31:
        return Long(node.value)
    if isinstance(node, parser.Negative):
        value = _typed(node.operand, message)
        return -value if type(value) in (int, float, Long) else None
    return evaluate(node, message)


def _together(operands: tuple[parser.Node, ...], message: Mapping[str, str], *, decided: bool) -> bool | None:
    unknown = False
    for operand in operands:
        value: bool | None = evaluate(operand, message)
        if value is decided:
            return decided
        unknown = unknown or value is None
    return None if unknown else not decided


def _equal(left: Any, right: Any) -> bool | None:
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    if type(left) is type(right) is str:
        return bool(left == right)
    return _compare(left, right) == 0


def _compare(left: Any, right: Any) -> int:
    """Java's compareTo after its conversions; -1 for what cannot be compared."""
    if isinstance(left, bool):
        if isinstance(right, str):
            raise Failed
        return (left > right) - (left < right) if isinstance(right, bool) else -1
    if isinstance(right, bool):
        if not isinstance(left, str):
            return -1
        left = left.lower() == "true"
    elif isinstance(left, str):
        left = _like(left, right)
    elif isinstance(right, str):
        right = _like(right, left)
    if isinstance(left, float) or isinstance(right, float):
        left, right = _rank(float(left)), _rank(float(right))
    return int(left > right) - int(left < right)


def _like(text: str, number: float) -> int | float:
    if isinstance(number, float):
        return java_double(text)
    bits = 63 if isinstance(number, Long) else 31
    if not re.fullmatch(r"[+-]?[0-9٠-٩]+", text):
        raise Failed
    value = int(text)
    if not -(2**bits) <= value < 2**bits:
        raise Failed
    return value


def _rank(value: float) -> tuple[int, Any, int]:
    """A key in the order of Java's doubles."""
    if value != value:
        return (2, 0, 0)
    if value in (float("inf"), float("-inf")):
        return (1 if value > 0 else -1, 0, 0)
    negative_zero = struct.pack(">d", value)[0] >> 7 and value == 0
    return (0, Fraction(value), -1 if negative_zero else 0)


def java_double(text: str) -> float:
    """``Double.valueOf`` by exact arithmetic. Raises Failed where it throws."""
    text = text.strip("".join(map(chr, range(33))))
    sign = -1.0 if text.startswith("-") else 1.0
    digits = text[1:] if text[:1] in ("+", "-") else text
    if digits in ("NaN", "Infinity"):
        return sign * float(digits)
    if digits[-1:] in tuple("fFdD") and (not digits.lower().startswith("0x") or "p" in digits.lower()):
        digits = digits[:-1]
    if digits[:2].lower() == "0x":
        found = re.fullmatch(r"0[xX]([0-9a-fA-F]*)\.?([0-9a-fA-F]*)[pP]([+-]?[0-9]+)", digits)
        if found is None or not found[1] + found[2]:
            raise Failed
        return sign * float(
            Fraction(int(found[1] + found[2], 16)) * Fraction(2) ** (_bounded(found[3]) - 4 * len(found[2]))
        )
    found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE]([+-]?[0-9]+))?", digits)
    if found is None:
        raise Failed
    return sign * float(Decimal(f"{found[1]}e{_bounded(found[3] or '0')}"))


def _bounded(exponent: str) -> int:
    """The exponent, or one that does the same to every number of a few thousand digits: Decimal takes no greater ones."""
    return max(-100_000, min(int(exponent), 100_000))
