"""The compressed bodies of the messages that a poll is about to return: which of them can be decoded?

Like RocketMQ's node this one does not look into bodies, so a sender may mark any body as compressed. Only an attempt to decode
it shows whether it is. A poll returns a message with a bad body alone, so it must decode before it makes a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from commitmq.client.receiving.part import Part
from commitmq.errors import UndecodableBodyError
from commitmq.format.constants import SysFlag

# Decoded bodies are kept up to this size, so most bodies are decoded once. The others are decoded twice.
_KEPT_BYTES: Final = 32 * 1024 * 1024


def decodable(parts: Sequence[Part], most: int) -> int:
    """The number of messages, at most ``most``, before the first one in ``parts`` whose body cannot be decoded."""
    count, kept = 0, 0
    for part in parts:
        size = min(len(part), most - count)
        for index in np.flatnonzero(part.heads["sys_flag"][:size] & SysFlag.COMPRESSED).tolist():
            body = part.body_of(index)
            if part.decoded is None:
                part.decoded = {}
            if isinstance(body, UndecodableBodyError):
                part.decoded[int(part.positions[index])] = body
                return count + index
            kept += len(body)
            if kept <= _KEPT_BYTES:
                part.decoded[int(part.positions[index])] = body
        count += size
        if count == most:
            break
    return count
