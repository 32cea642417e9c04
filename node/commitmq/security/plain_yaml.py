"""A strict reader of the YAML that RocketMQ's ``plain_acl.yml`` uses: keys, lists, texts, comments.

Every text stays as it is written: the secret ``0123`` is no number. What the reader does not know is refused with the number
of the line: several documents, anchors, tags, texts over several lines, objects in braces. An error never shows what a line
holds, which may be a secret.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

_KEY: Final = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)[ ]*:(?:[ ]+|$)").match
_NULLS: Final = ("", "~", "null", "Null", "NULL")
_RESERVED: Final = "&*!|>{}[]%@`,?\"'"
_MOST_LEVELS: Final = 8


@dataclass(frozen=True, slots=True)
class Node:
    """A value, and the number of its line, from 1 on. None: there is nothing behind the key."""

    line: int
    value: Value


Value: TypeAlias = str | dict[str, Node] | list[Node] | None


class _Line(NamedTuple):
    number: int
    indent: int
    text: str

    @property
    def is_item(self) -> bool:
        return self.text == "-" or self.text.startswith("- ")


def read_yaml(text: str) -> Node:
    """The document. Raises ValueError that names the line."""
    reader = _Reader(_lines(text))
    node = reader.block(1, 0)
    if (line := reader.line) is not None:
        raise _error(line.number, "it is indented less than the lines before, or is of another kind")
    return node


def _lines(text: str) -> list[_Line]:
    found: list[_Line] = []
    for number, raw in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        shown = raw.rstrip(" \t")
        content = shown.lstrip(" ")
        if not content or content.startswith("#"):
            continue
        if content.startswith("\t"):
            raise _error(number, "it is indented with a tab, which YAML does not allow")
        if shown == "---" and not found:
            continue
        if shown.startswith(("---", "...", "%")):
            raise _error(number, "only one document without directives is read")
        found.append(_Line(number, len(shown) - len(content), content))
    return found


class _Reader:
    """Lines, and the place of the next one."""

    def __init__(self, lines: list[_Line]) -> None:
        self._lines = lines
        self._at = 0

    @property
    def line(self) -> _Line | None:
        return self._lines[self._at] if self._at < len(self._lines) else None

    def block(self, number: int, level: int) -> Node:
        """The list or the keys that begin with the next line. ``number``: the line to which they belong."""
        line = self.line
        if line is None:
            return Node(number, None)
        if level > _MOST_LEVELS:
            raise _error(line.number, f"more than {_MOST_LEVELS} levels")
        return Node(line.number, self._items(line.indent, level) if line.is_item else self._keys(line.indent, level))

    def _keys(self, indent: int, level: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while (
            (line := self.line) is not None and line.indent >= indent and not (line.indent == indent and line.is_item)
        ):
            match = _KEY(line.text)
            if line.indent > indent or match is None:
                raise _error(line.number, "a key with a colon and a blank must be here, indented as those before")
            if match[1] in found:
                raise _error(line.number, f"the key {match[1]} is there twice")
            self._at += 1
            rest = line.text[match.end() :]
            if rest and not rest.startswith("#"):
                found[match[1]] = _value(line.number, rest)
                continue
            after = self.line
            # The items of a list may stand right below their key.
            deeper = after is not None and (after.indent > indent or (after.indent == indent and after.is_item))
            found[match[1]] = self.block(line.number, level + 1) if deeper else Node(line.number, None)
        return found

    def _items(self, indent: int, level: int) -> list[Node]:
        found = []
        while (line := self.line) is not None and line.indent == indent and line.is_item:
            rest = line.text[1:].lstrip(" ")
            if not rest or rest.startswith("#"):
                self._at += 1
                after = self.line
                deeper = after is not None and after.indent > indent
                found.append(self.block(line.number, level + 1) if deeper else Node(line.number, None))
            elif _KEY(rest):
                self._lines[self._at] = _Line(line.number, line.indent + len(line.text) - len(rest), rest)
                found.append(self.block(line.number, level + 1))
            else:
                self._at += 1
                found.append(_value(line.number, rest))
        if line is not None and line.indent > indent:
            raise _error(line.number, "it is indented more than the item before")
        return found


def _value(number: int, text: str) -> Node:
    """A text, or a list in brackets, which end with the line."""
    if not text.startswith("["):
        value, rest = _scalar(number, text, ends="")
        _check_end(number, rest)
        return Node(number, value)
    items: list[Node] = []
    rest = text[1:].lstrip(" ")
    while not rest.startswith("]"):
        value, rest = _scalar(number, rest, ends=",]")
        items.append(Node(number, value))
        rest = rest.lstrip(" ")
        if rest.startswith(","):
            rest = rest[1:].lstrip(" ")
        elif not rest.startswith("]"):
            raise _error(number, "the list in brackets must end in its line")
    _check_end(number, rest[1:])
    return Node(number, items)


def _check_end(number: int, rest: str) -> None:
    if rest.strip(" ") and not re.match(r"[ \t]+#", rest):
        raise _error(number, "something is behind the end of the value")


def _scalar(number: int, text: str, *, ends: str) -> tuple[str | None, str]:
    """A text and what is behind it; one without quotes ends at a comment, and at the characters ``ends``."""
    if text.startswith("'"):
        quoted = re.match(r"'((?:[^']|'')*)'", text)
        if quoted is None:
            raise _error(number, "the quote does not end in its line")
        return quoted[1].replace("''", "'"), text[quoted.end() :]
    if text.startswith('"'):
        quoted = re.match(r'"((?:[^"\\]|\\["\\])*)"', text)
        if quoted is None:
            raise _error(
                number, 'the quote does not end in its line, or has a \\ before another character than \\ and "'
            )
        return re.sub(r"\\(.)", r"\1", quoted[1]), text[quoted.end() :]
    if text.startswith(tuple(_RESERVED)) or (text[:1] in "-?:" and text[1:2] in " "):
        raise _error(number, "a value that begins so must be in quotes")
    end = re.search(rf"[ \t]+#|[{re.escape(ends)}]" if ends else r"[ \t]+#", text)
    plain = text if end is None else text[: end.start()]
    if re.search(r":(?:[ \t]|$)", plain):
        raise _error(number, "a value with a colon and a blank must be in quotes")
    plain = plain.rstrip(" \t")
    return None if plain in _NULLS else plain, "" if end is None else text[end.start() :]


def _error(number: int, sentence: str) -> ValueError:
    return ValueError(f"line {number}: {sentence}")
