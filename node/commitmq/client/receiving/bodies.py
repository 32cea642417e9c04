"""Compressed bodies of what a poll is about to hand out: which of them can be decoded.

The node does not look into bodies, as RocketMQ's does not, so a sender may say "compressed" of anything. Whoever reads it
learns of that only by decoding it, and a poll must know beforehand what it hands out together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from commitmq.client.receiving.part import Part
from commitmq.errors import UndecodableBodyError
from commitmq.format.constants import SysFlag

# Bodies that were decoded to look at them are kept up to this, so that most are decoded once; what is beyond it twice.
_KEPT_BYTES: Final = 32 * 1024 * 1024


def decodable(parts: Sequence[Part], most: int) -> int:
    """How many of the first ``most`` messages of ``parts`` come before one whose body cannot be decoded."""
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
