"""``commitmq/epoch``: how often a node was started on this store, as a decimal number and a line feed."""

from __future__ import annotations

from pathlib import Path

from commitmq.errors import StoreError


def read_epoch(path: Path) -> int:
    """The number in ``path``; 0 without the file. Raises StoreError."""
    try:
        return int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0
    except ValueError as error:
        sentence = "the count of starts is not a number; write one at least as high as before"
        raise StoreError(sentence, path=path) from error
