"""What a consumer wants of its topics: a tag expression, or an expression of any type that the node has a filter for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageSelector:
    """An expression and its type: ``TAG``, ``SQL92``, or one that a plugin of the node adds."""

    type: str
    expression: str

    def __post_init__(self) -> None:
        if not isinstance(self.type, str) or not self.type:
            raise ValueError("a selector needs the name of its type")
        if not isinstance(self.expression, str):
            raise ValueError(f"a selector's expression must be a string, not {type(self.expression).__name__}")

    def header(self) -> dict[str, str]:
        """The fields of a pull that say so; none when every message is wanted."""
        if self.type == "TAG":
            return {} if self.expression.strip() in ("", "*") else {"filter": self.expression}
        return {"filter_type": self.type, "filter": self.expression}


class Sql(MessageSelector):
    """An SQL92 expression on properties: ``Sql("price > 10 AND region = 'eu'")``. ``TAGS`` and ``KEYS`` are two of them.

    It is checked on the node: a wrong one makes ``poll`` raise ProtocolError with the position of the mistake.
    """

    __slots__ = ()

    def __init__(self, expression: str) -> None:
        MessageSelector.__init__(self, "SQL92", expression)


def selector(wanted: str | MessageSelector) -> MessageSelector:
    """``wanted`` itself, or the tag expression that a string is.

    Raises ValueError for a string with a single ``|``, which is almost always meant as ``||``. A tag that has one is wanted
    by ``MessageSelector("TAG", "a|b")``.
    """
    if isinstance(wanted, MessageSelector):
        return wanted
    if isinstance(wanted, str) and any("|" in part for part in wanted.split("||")):
        meant = " || ".join(part for one in wanted.split("|") if (part := one.strip()))
        raise ValueError(f"the tag expression {wanted!r} has a single '|': tags are separated by two, {meant!r}")
    return MessageSelector("TAG", wanted)
