"""``commitmq/epoch``: how often a node was started on this store, as a decimal number and a line feed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from commitmq.errors import StoreError

_MOST: Final = 1 << 62


def read_epoch(path: Path) -> int:
    """The number in ``path``; 0 without the file. Raises StoreError."""
    try:
        if not 0 <= (epoch := int(path.read_text(encoding="ascii"))) < _MOST:
            raise ValueError("it has more than 62 bits")
        return epoch
    except FileNotFoundError:
        return 0
    except ValueError as error:
        sentence = "the count of starts is no such number; write one at least as high as before"
        raise StoreError(sentence, path=path) from error
