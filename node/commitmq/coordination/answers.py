"""The result of an operation of the coordinator: the answer, and the writes that must end before the answer is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from commitmq.coordination.requests import Header

Part = Literal["topics", "offsets", "groups"]
Fields = dict[str, Any]


class Answer(NamedTuple):
    """A positive answer. ``fields`` is called after the turn's writes, unless the part in ``needs`` failed.

    ``after``: a topic and its incarnation whose deletion must finish first, see :meth:`Service.is_ending`.
    """

    fields: Callable[[], Fields]
    needs: Part | None = None
    after: tuple[str, int] | None = None


Operations = dict[str, Callable[[Header, int], Answer]]
"""Operations by the name in a request. Each gets the header and the monotonic time in ms; it raises ProtocolError for the
answer, StoreError when the disk refused.
"""
