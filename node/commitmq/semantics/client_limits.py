"""How much a gateway tells the coordinator of one client, and of how many at once (PROTOCOL.md, ``client.heard``).

A client chooses its id and its groups, so each limit holds whatever a client says of itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MAX_CLIENTS_A_REQUEST: Final = 200
MAX_NAMES: Final = 32
"""Names in one list of a client: of groups that it consumes in, of groups that it produces in, of topics."""
MAX_CHARACTERS: Final = 2_048
"""Of all texts of one client together."""
FORGET_MS: Final = 150_000
"""A client of which nobody told for so long is forgotten. Clients of RocketMQ end after 120 s without a heartbeat."""


def shortened(spent: int, *lists: Iterable[str]) -> tuple[list[list[str]], int]:
    """Of each list, in the order of its names, what the limits leave room for, and how many names were left out.

    ``spent``: characters of the client's other texts.
    """
    kept: list[list[str]] = []
    left_out = 0
    for names in lists:
        kept.append([])
        for name in sorted(names):
            if len(kept[-1]) < MAX_NAMES and spent + len(name) <= MAX_CHARACTERS:
                kept[-1].append(name)
                spent += len(name)
            else:
                left_out += 1
    return kept, left_out
