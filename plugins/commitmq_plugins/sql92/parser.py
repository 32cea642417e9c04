"""Parses SQL92 filter expressions (spec 12.7) by recursive descent, and refuses the expressions that RocketMQ refuses.

    or          = and { OR and }
    and         = equality { AND equality }
    equality    = comparison { ("=" | "<>") comparison | IS [NOT] NULL }
    comparison  = unary { ("<" | "<=" | ">" | ">=") unary
                        | [NOT] (CONTAINS | STARTSWITH | ENDSWITH) string
                        | [NOT] BETWEEN unary AND unary
                        | [NOT] IN "(" string { "," string } ")" }
    unary       = "+" unary | "-" unary | NOT unary | primary
    primary     = string | integer | decimal | TRUE | FALSE | NULL | identifier | "(" or ")"

NOT binds tighter than a comparison: ``NOT a = 1`` is ``(NOT a) = 1``, as in RocketMQ. A library would bring another
dialect's rules; the whole grammar is the ten lines above.

Three things are more lenient, or stricter, than in RocketMQ 5.4, where its way only hurts users. Text behind a complete
expression is an error instead of being ignored (in RocketMQ ``a = 1 b = 2`` means ``a = 1``). A comment that begins
with ``--`` may end with the text. A decimal literal may be zero (``price > 0.0``).

The nodes of a parsed expression. ``is_boolean`` says which of them have truth values.

RocketMQ distinguishes three kinds of nodes, and so do the rules about comparisons: constants in the text, properties,
and everything composed of others. A negated number is of the third kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from commitmq.errors import FilterError

Constant = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, a string, TRUE, FALSE or NULL. ``is_long`` as in Java: an integer outside 32 bits."""

    value: Constant


@dataclass(frozen=True, slots=True)
class PropertyExpression:
    """A property of the message, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Negative:
    """``-operand``: a number if the operand is one, else NULL. A property is a string, so its negative is NULL."""

    operand: Node


@dataclass(frozen=True, slots=True)
class AsBoolean:
    """A property in the place of a truth value: FALSE when the message has it, because it is a string, else NULL."""

    operand: PropertyExpression


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

    operand: PropertyExpression
    texts: tuple[str, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class TextTest:
    """``operand [NOT] CONTAINS | STARTSWITH | ENDSWITH text``; FALSE for every value that is no string, negated or not."""

    how: str
    operand: Node
    text: str
    negated: bool


Node = Literal | PropertyExpression | Negative | AsBoolean | Not | And | Or | Equal | Order | IsNull | In | TextTest

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
            case PropertyExpression(name):
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


MAX_EXPRESSION_CHARACTERS: Final = 16_384
MAX_DEPTH: Final = 100
_GREATEST_LONG: Final = (1 << 63) - 1

_KEYWORDS: Final = frozenset(
    ("NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH", "ENDSWITH")
)
_CONSTANTS: Final[dict[str, Constant]] = {"TRUE": True, "FALSE": False, "NULL": None}
_TEXT_TESTS: Final = ("CONTAINS", "STARTSWITH", "ENDSWITH")
_ORDERS: Final = ("<", "<=", ">", ">=")

# The longest alternative of each kind comes first. In a sensible expression no letter follows a number, but RocketMQ's
# scanner does not require a gap: it then reads the letters as the next token.
_TOKEN: Final = re.compile(
    r"""
    (?P<blank>[ \t\n\r\f]+ | --[^\n\r]* | /\*(?:[^*]|\*(?!/))*\*/)
  | (?P<decimal>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)? | \.[0-9]+(?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+)
  | (?P<integer>[1-9][0-9]*[lL]? | 0)
  | (?P<string>'(?:''|[^'])*')
  | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
  | (?P<symbol><> | <= | >= | [=<>()+,-])
    """,
    re.VERBOSE,
)


class Token(NamedTuple):
    """``kind``: a keyword or symbol itself, or ``integer``, ``decimal``, ``string``, ``name``, ``end``; ``at`` from 1."""

    kind: str
    text: str
    at: int


def parse(expression: str) -> Node:
    """The tree of ``expression``, whose root has a truth value. Raises FilterError with position and reason."""
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        raise FilterError(
            f"the expression has {len(expression)} characters, at most {MAX_EXPRESSION_CHARACTERS} are allowed"
        )
    return _Parser(_tokens(expression)).whole()


def _tokens(expression: str) -> list[Token]:
    tokens = []
    at = 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None:
            raise FilterError(_cannot_read(expression, at), position=at + 1)
        kind, text = str(found.lastgroup), found[0]
        if kind == "name" and text.upper() in _KEYWORDS:
            kind = text.upper()
        elif kind == "symbol":
            kind = text
        if kind != "blank":
            tokens.append(Token(kind, text, at + 1))
        at = found.end()
    tokens.append(Token("end", "", len(expression) + 1))
    return tokens


def _cannot_read(expression: str, at: int) -> str:
    if expression[at] == "'":
        return "the string has no closing quote"
    if expression.startswith("/*", at):
        return "the comment has no closing */"
    hint = {"!": "; unequal is <>", '"': "; strings are in single quotes"}.get(expression[at], "")
    return f"{expression[at]!r} cannot begin anything here{hint}"


class _Parser:
    """One pass over the tokens; each method reads one rule of the grammar."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    # ------------------------------------------------------------ tokens

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def _take(self) -> Token:
        token = self._tokens[self._next]
        if token.kind != "end":
            self._next += 1
        return token

    def _takes(self, *kinds: str) -> Token | None:
        """The next token if it is one of ``kinds``."""
        return self._take() if self._token.kind in kinds else None

    def _expect(self, kind: str, what: str) -> Token:
        token = self._takes(kind)
        if token is None:
            raise self._missing(what)
        return token

    def _missing(self, wanted: str) -> FilterError:
        token = self._token
        found = "the expression ends" if token.kind == "end" else f"there is {token.text[:40]!r}"
        return FilterError(f"{wanted} is missing, {found}", position=token.at)

    def _deeper(self, at: int) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise FilterError(f"the expression is nested more than {MAX_DEPTH} levels deep", position=at)

    # ------------------------------------------------------------ rules

    def whole(self) -> Node:
        node = self._boolean(self._or(), 1)
        if self._token.kind != "end":
            raise FilterError(
                f"nothing may follow here, but there is {self._token.text[:40]!r}", position=self._token.at
            )
        return node

    def _or(self) -> Node:
        start = self._token.at
        first = self._and()
        if self._token.kind != "OR":
            return first
        operands = [self._boolean(first, start)]
        while self._takes("OR"):
            start = self._token.at
            operands.append(self._boolean(self._and(), start))
        return Or(tuple(operands))

    def _and(self) -> Node:
        start = self._token.at
        first = self._equality()
        if self._token.kind != "AND":
            return first
        operands = [self._boolean(first, start)]
        while self._takes("AND"):
            start = self._token.at
            operands.append(self._boolean(self._equality(), start))
        return And(tuple(operands))

    def _equality(self) -> Node:
        depth = self._depth
        start = self._token.at
        left = self._comparison()
        while (token := self._takes("=", "<>", "IS")) is not None:
            self._deeper(token.at)
            if token.kind == "IS":
                negated = self._takes("NOT") is not None
                self._expect("NULL", "NULL")
                left = Not(IsNull(left)) if negated else IsNull(left)
                continue
            right_at = self._token.at
            right = self._comparison()
            _check_equal(left, start, right, right_at)
            left = Equal(left, right) if token.kind == "=" else Not(Equal(left, right))
        self._depth = depth
        return left

    def _comparison(self) -> Node:
        depth = self._depth
        start = self._token.at
        left = self._unary()
        while True:
            token = self._token
            negated = token.kind == "NOT"
            kind = self._tokens[self._next + 1].kind if negated else token.kind
            if kind not in ("BETWEEN", "IN", *_TEXT_TESTS, *(() if negated else _ORDERS)):
                break
            self._deeper(token.at)
            self._next += 2 if negated else 1
            if kind in _ORDERS:
                right_at = self._token.at
                left = _order(kind, left, start, self._unary(), right_at)
            elif kind == "BETWEEN":
                left = self._between(left, start, negated)
            elif kind == "IN":
                left = self._in(left, start, negated)
            else:
                text = _unquoted(self._expect("string", f"a string after {kind}"))
                left = TextTest(kind, left, text, negated)
        if self._token.kind == "NOT":
            self._next += 1
            raise self._missing("BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH after NOT")
        self._depth = depth
        return left

    def _between(self, value: Node, start: int, negated: bool) -> Node:
        low_at = self._token.at
        low = self._unary()
        self._expect("AND", "AND")
        high_at = self._token.at
        high = self._unary()
        if negated:
            return Or((_order("<", value, start, low, low_at), _order(">", value, start, high, high_at)))
        both = And((_order(">=", value, start, low, low_at), _order("<=", value, start, high, high_at)))
        if (
            isinstance(low, Literal)
            and isinstance(high, Literal)
            and isinstance(low.value, int | float)
            and isinstance(high.value, int | float)
            and low.value > high.value
        ):
            raise FilterError(f"BETWEEN needs the lesser value first: {low.value} > {high.value}", position=low_at)
        return both

    def _in(self, value: Node, start: int, negated: bool) -> Node:
        if not isinstance(value, PropertyExpression):
            raise FilterError("only a property can be IN a list", position=start)
        self._expect("(", "( after IN")
        texts = [_unquoted(self._expect("string", "a string in the list of IN"))]
        while self._takes(","):
            texts.append(_unquoted(self._expect("string", "a string in the list of IN")))
        self._expect(")", ") or , in the list of IN")
        return In(value, tuple(texts), negated)

    def _unary(self) -> Node:
        depth = self._depth
        token = self._takes("+", "-", "NOT")
        if token is None:
            return self._primary()
        self._deeper(token.at)
        start = self._token.at
        operand = self._unary()
        self._depth = depth
        if token.kind == "+":
            return operand
        return Negative(operand) if token.kind == "-" else Not(self._boolean(operand, start))

    def _primary(self) -> Node:
        token = self._token
        if token.kind == "(":
            self._take()
            self._deeper(token.at)
            node = self._or()
            self._expect(")", ")")
            self._depth -= 1
            return node
        if token.kind == "name":
            return PropertyExpression(self._take().text)
        if token.kind in _CONSTANTS:
            self._take()
            return Literal(_CONSTANTS[token.kind])
        if token.kind == "string":
            return Literal(_unquoted(self._take()))
        if token.kind == "integer":
            return Literal(_integer(self._take()))
        if token.kind == "decimal":
            return Literal(_decimal(self._take()))
        raise self._missing("a property, a literal or (")

    def _boolean(self, node: Node, at: int) -> Node:
        """``node`` where a truth value is needed."""
        if isinstance(node, PropertyExpression):
            return AsBoolean(node)
        if not is_boolean(node):
            raise FilterError("this has no truth value; compare it with something", position=at)
        return node


def _order(symbol: str, left: Node, left_at: int, right: Node, right_at: int) -> Order:
    for node, at in ((left, left_at), (right, right_at)):
        if is_boolean(node) or (isinstance(node, Literal) and isinstance(node.value, str)):
            raise FilterError(f"only numbers and properties can be compared by {symbol} or BETWEEN", position=at)
    return Order(symbol, left, right)


def _check_equal(left: Node, left_at: int, right: Node, right_at: int) -> None:
    for node, at in ((left, left_at), (right, right_at)):
        if isinstance(node, Literal) and node.value is None:
            raise FilterError("nothing equals NULL; write IS NULL", position=at)
    if isinstance(left, Literal) and isinstance(right, Literal) and is_boolean(left) and not is_boolean(right):
        raise FilterError("a truth value cannot be compared with this constant", position=right_at)


def _unquoted(token: Token) -> str:
    return token.text[1:-1].replace("''", "'")


def _integer(token: Token) -> int:
    digits = token.text.rstrip("lL")
    if len(digits) > 19 or int(digits) > _GREATEST_LONG:
        raise FilterError("the number does not fit into 64 bits; with a decimal point it is a float", position=token.at)
    return int(digits)


def _decimal(token: Token) -> float:
    value = float(token.text)
    if value == float("inf") or (value == 0.0 and re.search("[1-9]", token.text.lower().partition("e")[0])):
        raise FilterError("the number does not fit into a double", position=token.at)
    return value
