"""A store held for offline work: nobody else may use it meanwhile, and its sizes are those of its files.

Who holds a store is told by the same lock that nodes and RocketMQ take, and by the locks of workers, which may outlive a
supervisor that was killed for a moment.
"""

from __future__ import annotations

import fcntl
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from commitmq.config import NodeConfig
from commitmq.errors import StoreError, StoreLockedError
from commitmq.store.batch_consume_queue import BATCH_UNIT_BYTES
from commitmq.store.format import UNIT_BYTES
from commitmq.store.layout import StoreLayout
from commitmq.store.store_lock import StoreLock
from commitmq.store.topic_config import TopicTable


class HeldStore:
    """The store in ``root``, from ``with`` to its end. ``config`` has the sizes that its files show."""

    def __init__(self, root: Path, config: NodeConfig) -> None:
        """Looks at the folder; nothing is locked yet. Raises StoreError when it is no store."""
        self.layout = StoreLayout(root.absolute())
        if not self.layout.commit_log.is_dir():
            raise StoreError("this is no store: it has no folder commitlog", path=root)
        self.config = _with_sizes(self.layout, config)
        self._lock = StoreLock(self.layout.lock)
        self._topics: TopicTable | None = None

    def __enter__(self) -> Self:
        """Take the lock. Raises StoreLockedError when a node, RocketMQ or another tool uses the store."""
        self._lock.acquire()
        try:
            for path in self.layout.run.glob("*.lock"):
                _refuse_when_held(path)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def topic_attributes(self, topic: str) -> dict[str, str] | None:
        """Attributes of a topic; None for one that is not in ``topics.json``."""
        if self._topics is None:
            self._topics = TopicTable.load(self.layout.config / "topics.json")
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


def _with_sizes(layout: StoreLayout, config: NodeConfig) -> NodeConfig:
    """``config`` with the sizes of the store's own files, where there are any."""
    segment = _first_size(layout.commit_log)
    if segment:
        config = replace(config, commit_log=replace(config.commit_log, segment_bytes=segment))
    queues = config.consume_queue
    return replace(
        config,
        consume_queue=replace(
            queues,
            file_bytes=_queue_file_size(layout.consume_queue, UNIT_BYTES, queues.file_bytes),
            batch_file_bytes=_queue_file_size(layout.batch_consume_queue, BATCH_UNIT_BYTES, queues.batch_file_bytes),
            ext_file_bytes=_queue_file_size(layout.consume_queue_ext, 1, queues.ext_file_bytes),
        ),
    )


def _queue_file_size(folder: Path, unit_bytes: int, configured: int) -> int:
    """The size that most files of the queues have, for one may be damaged; the configured one when that has as many."""
    sizes = Counter(path.stat().st_size for path in folder.glob("*/*/" + "[0-9]" * 20))
    likely = {size: count for size, count in sizes.items() if size and size % unit_bytes == 0}
    return max(likely, key=lambda size: (likely[size], size == configured), default=configured)


def _first_size(folder: Path) -> int:
    names = sorted(path for path in folder.iterdir() if len(path.name) == 20 and path.name.isdecimal())
    return names[0].stat().st_size if names else 0
