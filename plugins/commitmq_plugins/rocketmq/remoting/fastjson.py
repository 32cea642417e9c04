"""The JSON of RocketMQ's bodies, as fastjson writes and reads it (remoting 1.2).

Written: UTF-8 without blanks; integer keys as texts; a map whose keys are queues with the queue itself as key, which is
no JSON any more: ``{{"brokerName":"b","queueId":0,"topic":"t"}:1}``. Java reads such maps in this form only.

Read: plain JSON, and beyond it what RocketMQ's own programs write: bare integers and queues as keys, single quotes.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

import orjson

from commitmq_plugins.rocketmq.remoting.frame import BodyError

_OPTIONS: Final = orjson.OPT_NON_STR_KEYS
_TEXT: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
MAX_DEPTH: Final = 64
MAX_CONTAINERS: Final = 500_000
"""Opening brackets of a body: an empty list of two bytes takes some 60 in memory, and a microsecond."""
MAX_VALUES: Final = 2_500_000
"""Commas of a body."""
MAX_NAME_CHARACTERS: Final = 255
"""Of the name of a topic, a group, a client or a broker, as the node allows."""
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, order=True)
class RemotingMessageQueue:
    """One queue of a broker. Queues sort by topic, broker and number, as RocketMQ's do."""

    topic: str
    broker_name: str
    queue_id: int

    def to_json(self) -> dict[str, Any]:
        return {"brokerName": self.broker_name, "queueId": self.queue_id, "topic": self.topic}

    @classmethod
    def from_json(cls, value: Any) -> RemotingMessageQueue:
        """Raises BodyError."""
        members = as_object(value, "a queue")
        topic, broker_name = members.get("topic"), members.get("brokerName")
        if not isinstance(topic, str) or not isinstance(broker_name, str):
            raise BodyError(f"a queue needs the texts topic and brokerName: {value!r:.200}")
        as_name(topic, "topic"), as_name(broker_name, "brokerName")
        return cls(topic, broker_name, as_int(members.get("queueId", 0), "queueId"))


def dumps(value: Any) -> bytes:
    """``value`` as a body: dicts (keys may be integers), lists, texts, numbers, booleans and :func:`queue_map`.

    Members that are None must have been omitted (:func:`without_none`). Raises BodyError for what is no JSON.
    """
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError as error:
        raise BodyError(f"this cannot be written as JSON: {error}") from error


def without_none(members: Mapping[str, Any]) -> dict[str, Any]:
    """``members`` without those that are None: fastjson leaves them out."""
    return {name: value for name, value in members.items() if value is not None}


def queue_map(values: Mapping[RemotingMessageQueue, Any]) -> orjson.Fragment:
    """A map with queues as keys, for :func:`dumps`."""
    pairs = [dumps(queue.to_json()) + b":" + dumps(value) for queue, value in values.items()]
    return orjson.Fragment(b"{" + b",".join(pairs) + b"}")


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The value of a body. Keys are texts, in maps of queues :class:`RemotingMessageQueue`. Raises BodyError."""
    plain = bytes(data)
    _check_size(plain)
    try:
        found = orjson.loads(plain)
    except orjson.JSONDecodeError:
        pass
    else:
        if _is_too_deep(plain):
            raise BodyError(f"the body is nested more than {MAX_DEPTH} deep")
        return found
    try:
        text = plain.decode()
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is no UTF-8: {error}") from error
    return _Lenient(text).document()


def _check_size(data: bytes) -> None:
    """Raises BodyError for a body that would take too long to read, or too much memory."""
    for marks, most in ((b"[{", MAX_CONTAINERS), (b",", MAX_VALUES)):
        count = sum(data.count(mark) for mark in marks)
        if count > most:
            raise BodyError(f"the body has {count} times {' or '.join(marks.decode())}, at most {most} are allowed")


def _is_too_deep(data: bytes) -> bool:
    """Whether a body, which is JSON, is nested too deep. Takes the innermost brackets away again and again: a look at each
    value would take three times as long as all else.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _TEXT.sub(b"", data).translate(None, _NO_BRACKETS)
    for _ in range(MAX_DEPTH + 1):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return bool(brackets)


def load_object(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The members of a body that is an object. Raises BodyError."""
    return as_object(loads(data), "the body")


def as_object(value: Any, what: str) -> dict[str, Any]:
    """``value``, which must be an object. Raises BodyError with ``what`` it should be."""
    if not isinstance(value, dict):
        raise BodyError(f"{what} must be a JSON object, not {value!r:.100}")
    return value


def as_list(value: Any, what: str) -> list[Any]:
    """``value``, which must be an array; an empty list for null. Raises BodyError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BodyError(f"{what} must be a JSON array, not {value!r:.100}")
    return value


def as_int(value: Any, what: str) -> int:
    """An integer of 64 bits, which may be a text: other clients quote some (remoting 1.13). Raises BodyError."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BodyError(f"{what} must be an integer, not {value!r:.100}")
    if not -(1 << 63) <= value < 1 << 63:
        raise BodyError(f"{what} must be an integer of 64 bits, not {value!s:.100}")
    return value


def as_text(value: Any, what: str) -> str:
    """A text. Raises BodyError."""
    if not isinstance(value, str):
        raise BodyError(f"{what} must be a text, not {value!r:.100}")
    return value


def as_name(value: Any, what: str) -> str:
    """A text that is kept: at most :data:`MAX_NAME_CHARACTERS`. Raises BodyError."""
    text = as_text(value, what)
    if len(text) > MAX_NAME_CHARACTERS:
        raise BodyError(f"{what} has {len(text)} characters, at most {MAX_NAME_CHARACTERS} are allowed")
    return text


def as_bool(value: Any, what: str) -> bool:
    """A boolean, which may be a text. False for null. Raises BodyError."""
    if isinstance(value, str):
        return value.lower() == "true"
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BodyError(f"{what} must be a boolean, not {value!r:.100}")
    return value


def as_map(value: Any, what: str, read: Callable[[Any], _Value]) -> dict[str, _Value]:
    """An object whose values ``read`` converts; an empty one for null. Raises BodyError."""
    return {} if value is None else {str(name): read(one) for name, one in as_object(value, what).items()}


_BLANK: Final = re.compile(r"[ \t\r\n]*")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_NAME: Final = re.compile(r"[A-Za-z_$][\w$]*")
_PLAIN: Final = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_WORDS: Final = {"true": True, "false": False, "null": None, "NaN": None}
_MAX_DIGITS: Final = 20


class _Lenient:
    """Reads what orjson refuses. Depth and length of numbers are limited; texts may have control characters."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def document(self) -> Any:
        value = self._value(0)
        self._blanks()
        if self._at != len(self._text):
            self._fail("something follows the value")
        return value

    def _fail(self, why: str) -> NoReturn:
        raise BodyError(f"the body is no JSON at character {self._at}: {why}")

    def _blanks(self) -> str:
        """Skip blanks; returns the next character, empty at the end."""
        found = _BLANK.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return self._text[self._at : self._at + 1]

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self._fail(f"it is nested more than {MAX_DEPTH} deep")
        next_one = self._blanks()
        if next_one == "{":
            return self._object(depth)
        if next_one == "[":
            return self._array(depth)
        if next_one in ('"', "'"):
            return self._string(next_one)
        if (found := _NUMBER.match(self._text, self._at)) is not None:
            return self._number(found)
        if (found := _NAME.match(self._text, self._at)) is not None and found.group() in _WORDS:
            self._at = found.end()
            return _WORDS[found.group()]
        return self._fail("a value is missing")

    def _number(self, found: re.Match[str]) -> int | float:
        self._at = found.end()
        text = found.group()
        if found.group(1) or found.group(2):
            return float(text)
        if len(text) > _MAX_DIGITS:
            self._fail(f"a number has more than {_MAX_DIGITS} digits")
        return int(text)

    def _object(self, depth: int) -> dict[Any, Any]:
        self._at += 1
        members: dict[Any, Any] = {}
        while (next_one := self._blanks()) != "}":
            if next_one == "," and members:
                self._at += 1
                continue
            key = self._key(next_one, depth)
            if self._blanks() != ":":
                self._fail("a colon is missing")
            self._at += 1
            members[key] = self._value(depth + 1)
            if self._blanks() not in (",", "}"):
                self._fail("a comma or a closing brace is missing")
        self._at += 1
        return members

    def _key(self, next_one: str, depth: int) -> str | RemotingMessageQueue:
        if next_one in ('"', "'"):
            return self._string(next_one)
        if next_one == "{":
            return RemotingMessageQueue.from_json(self._value(depth + 1))
        found = _NUMBER.match(self._text, self._at) or _NAME.match(self._text, self._at)
        if found is None:
            self._fail("a key is missing")
        self._at = found.end()
        return found.group()

    def _array(self, depth: int) -> list[Any]:
        self._at += 1
        values: list[Any] = []
        while (next_one := self._blanks()) != "]":
            if next_one == "," and values:
                self._at += 1
                continue
            values.append(self._value(depth + 1))
            if self._blanks() not in (",", "]"):
                self._fail("a comma or a closing bracket is missing")
        self._at += 1
        return values

    def _string(self, quote: str) -> str:
        start = self._at
        at = start + 1
        while True:
            found = _PLAIN[quote].match(self._text, at)
            assert found is not None
            at = found.end()
            if at >= len(self._text):
                self._fail("a text does not end")
            if self._text[at] == quote:
                break
            at += 2
        self._at = at + 1
        inner = self._text[start + 1 : at]
        if quote == "'":
            inner = inner.replace("\\'", "'").replace('"', '\\"')
        try:
            text: str = json.loads(f'"{inner}"', strict=False)
        except ValueError:
            self._at = start
            self._fail("a text has a wrong escape")
        return text.encode("utf-8", "replace").decode()
