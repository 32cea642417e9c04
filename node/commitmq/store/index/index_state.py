"""``commitmq/dispatchers/index/files.json``: which index files are durable, and the state at the last orderly stop.

    durable      name of the newest durable file; every older one is durable too. "" while there is none
    clean        the last stop was orderly: all files are complete and durable
    position     when clean: everything of the log below this offset is in the files
    newest       the newest file at that time ("" without one), and newest_end, the end offset in its header

The last two tell whether another program (RocketMQ) used the files since.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from commitmq.files import atomic_file
from commitmq.store.index.index_file import store_error


@dataclass(slots=True)
class SavedState:
    """See the module's text. Offsets are bytes of the log."""

    durable: str = ""
    clean: bool = False
    position: int = -1
    newest: str = ""
    newest_end: int = -1

    @classmethod
    def load(cls, path: Path) -> SavedState | None:
        """The file's content; None if it cannot be read: then RocketMQ's rule decides which files are durable."""
        try:
            data = orjson.loads(path.read_bytes())
            return cls(
                str(data["durable"]),
                data["clean"] is True,
                int(data["position"]),
                str(data["newest"]),
                int(data["newest_end"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, path: Path) -> None:
        """Write the file durably. Raises DiskFullError or StoreError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.replace(path, orjson.dumps(asdict(self)), "index_state")
        except OSError as error:
            raise store_error("cannot write the state of the index", error, path) from error
