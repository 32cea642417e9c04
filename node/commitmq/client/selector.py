"""The filter of a consumer: a tag expression, or an expression of another type that the node has a filter for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageSelector:
    """An expression and its type: ``TAG``, ``SQL92``, or a type that a plugin of the node adds."""

    type: str
    expression: str

    def __post_init__(self) -> None:
        if not isinstance(self.type, str) or not self.type:
            raise ValueError("a selector needs the name of its type")
        if not isinstance(self.expression, str):
            raise ValueError(f"a selector's expression must be a string, not {type(self.expression).__name__}")

    def header(self) -> dict[str, str]:
        """The fields of a pull with this filter; none if every message passes."""
        if self.type == "TAG":
            return {} if self.expression.strip() in ("", "*") else {"filter": self.expression}
        return {"filter_type": self.type, "filter": self.expression}


class Sql(MessageSelector):
    """An SQL92 expression on properties: ``Sql("price > 10 AND region = 'eu'")``. ``TAGS`` and ``KEYS`` are properties too.

    The node checks the expression. After a mistake ``poll`` raises ProtocolError, which has the position of the mistake.
    """

    __slots__ = ()

    def __init__(self, expression: str) -> None:
        MessageSelector.__init__(self, "SQL92", expression)


def selector(wanted: str | MessageSelector) -> MessageSelector:
    """``wanted`` itself, or a selector for a string, which is a tag expression.

    Raises ValueError for a string with a single ``|``, because almost always ``||`` is meant. ``MessageSelector("TAG",
    "a|b")`` selects a tag with this character.
    """
    if isinstance(wanted, MessageSelector):
        return wanted
    if isinstance(wanted, str) and any("|" in part for part in wanted.split("||")):
        meant = " || ".join(part for one in wanted.split("|") if (part := one.strip()))
        raise ValueError(f"the tag expression {wanted!r} has a single '|': tags are separated by two, {meant!r}")
    return MessageSelector("TAG", wanted)
