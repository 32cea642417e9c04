"""How much of a queue may be handed out: the limits of ``Consumer.run``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from commitmq.client.receiving.part import Part


class Room(NamedTuple):
    """So many messages and bytes of records. The message that passes ``size_bytes`` still belongs to it."""

    messages: int
    size_bytes: int

    def messages_of(self, parts: Sequence[Part]) -> int:
        """How many of the messages in ``parts`` there is room for."""
        count, size_bytes = 0, 0
        for part in parts:
            sums = part.heads["size"].cumsum(dtype="int64") + size_bytes
            count += min(int(sums.searchsorted(self.size_bytes)) + 1, len(part))
            size_bytes = int(sums[-1])
            if size_bytes >= self.size_bytes or count >= self.messages:
                break
        return min(count, self.messages)
