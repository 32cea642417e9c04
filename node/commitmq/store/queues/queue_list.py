"""Which queues a topic has on the disk, whatever its settings say."""

from __future__ import annotations

import os

from commitmq.errors import StoreError


def queues_on_disk(folder: str | os.PathLike[str], topic: str) -> list[int]:
    """The ids of the queues with a folder under ``folder``/``topic``, sorted. Raises StoreError when it cannot be listed."""
    path = os.path.join(folder, topic)
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"cannot list the queues: {error.strerror}", path=path) from error
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())
