"""A store held for offline work: nobody else may use it meanwhile, and its sizes are those of its files.

Who holds a store is told by the same lock that nodes and RocketMQ take, and by the locks of workers, which may outlive a
supervisor that was killed for a moment.
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
    """The store in ``root``, from ``with`` to its end. ``config`` has its sizes, see :mod:`commitmq.config.fitting`."""

    def __init__(self, root: Path, config: NodeConfig, *, new_index: bool = False) -> None:
        """Looks at the folder; nothing is locked yet. Raises StoreError when it is no store, or has other sizes than were
        given. ``new_index``: its index is to be made anew, so given sizes of that need not be those it has.
        """
        self.layout = StoreLayout(root.absolute())
        require_store(self.layout)
        self.config = fit(self.layout, config, offline=True, new_index=new_index).config
        self._lock = StoreLock(self.layout.lock)
        self._topics: TopicTable | None = None

    def __enter__(self) -> Self:
        """Take the lock, and the umask of who writes to this store. Raises StoreLockedError when somebody uses it."""
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
        """Attributes of a topic; None for one that is not there."""
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
