"""A store held for offline work: no other process may use it meanwhile, and its sizes are those of its files.

The holder is detected by the lock that nodes and RocketMQ take, and by the locks of workers, which may outlive a killed
supervisor for a moment.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from commitmq.config import NodeConfig
from commitmq.config.fitting import fit
from commitmq.errors import StoreLockedError
from commitmq.store.access import require_store, umask_of
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata.topic_config import TopicTable
from commitmq.store.metadata.topic_files import load_topics
from commitmq.store.store_lock import StoreLock


class HeldStore:
    """The store in ``root``, held during a ``with`` block. ``config`` has its sizes, see :mod:`commitmq.config.fitting`."""

    def __init__(self, root: Path, config: NodeConfig, *, new_index: bool = False) -> None:
        """Examines the folder; locks nothing yet. Raises StoreError when it is not a store, or has other sizes than the
        given ones. ``new_index``: its index is about to be rebuilt, so given index sizes may differ from the store's.
        """
        self.layout = StoreLayout(root.absolute())
        require_store(self.layout)
        self.config = fit(self.layout, config, offline=True, new_index=new_index).config
        self._lock = StoreLock(self.layout.lock)
        self._topics: TopicTable | None = None

    def __enter__(self) -> Self:
        """Take the lock, and the umask of the store's writers. Raises StoreLockedError when a process uses the store."""
        self._lock.acquire()
        self._umask = os.umask(umask_of(self.layout.root))
        try:
            for path in self.layout.run.glob("*.lock"):
                _refuse_when_held(path)
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._let_go()

    def _let_go(self) -> None:
        os.umask(self._umask)
        self._lock.release()

    def topic_attributes(self, topic: str) -> dict[str, str] | None:
        """Attributes of a topic; None for an unknown one."""
        if self._topics is None:
            self._topics = load_topics(self.layout)
        known = self._topics.topics.get(topic)
        return None if known is None else known.attributes


def _refuse_when_held(path: Path) -> None:
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreLockedError(
                f"the node's {path.stem} process still runs; stop the node first", pid=0, path=path
            ) from error
