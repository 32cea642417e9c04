"""A store held for offline work, and the runner of a job's tasks on it.

No other process may use the store in the meantime, and its sizes are those of its files.

The holder is detected by the lock that nodes and RocketMQ take, and by the locks of workers, which may outlive a killed
supervisor for a moment.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from commitmq.config import NodeConfig
from commitmq.config.fitting import fit
from commitmq.errors import CommitMQError, StoreLockedError
from commitmq.format.constants import SysFlag
from commitmq.kernels.codes import ROW
from commitmq.store.access import StoreLock, require_store, umask_of
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH, TopicTable
from commitmq.store.metadata.topic_files import load_tombstones, load_topics


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


_MAPS = 2  # a task reads only one segment


@dataclass(frozen=True, slots=True)
class StoreView:
    """The data about a held store that a task needs: plain values that can be sent to another process.

    Tasks read the store itself by its path, so a process on another machine must see the same folder there.

    ``bases`` are the base offsets of the log's segments, ``deleted`` the tombstones of deleted topics.

    ``batch_topics`` says for every known topic whether its queues are batch queues.
    """

    root: Path
    config: NodeConfig
    bases: tuple[int, ...]
    was_open: bool
    deleted: Mapping[str, int] = field(default_factory=dict)
    batch_topics: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, store: HeldStore, bases: tuple[int, ...]) -> StoreView:
        """Tables that cannot be read count as empty: a caller that needs them must read them before."""
        return cls(
            store.layout.root,
            store.config,
            bases,
            store.layout.abort.exists(),
            _tombstones(store.layout),
            _batch_topics(store.layout),
        )

    @property
    def layout(self) -> StoreLayout:
        return StoreLayout(self.root)

    @property
    def segment_bytes(self) -> int:
        return self.config.commit_log.segment_bytes

    def open_log(self) -> CommitLog:
        """The log, opened for one task. Raises StoreError."""
        return CommitLog(self.layout.commit_log, self.segment_bytes, max_mapped=_MAPS)

    def walker(self, log: CommitLog) -> LogWalker:
        """Walks batches of the size that the node's dispatchers get."""
        return LogWalker(log, max_rows=self.config.dispatch.batch_messages, max_bytes=self.config.dispatch.batch_bytes)

    def in_batch_queues(self, topics: list[str], rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which of ``rows`` (dtype ROW) get a unit of a batch queue. For unknown topics the records decide."""
        assert rows.dtype == ROW
        kinds = [self.batch_topics.get(topic) for topic in topics]
        if all(kind is False for kind in kinds):
            return np.zeros(len(rows), np.bool_)
        table = np.array([-1 if kind is None else int(kind) for kind in kinds], np.int8)[rows["topic"]]
        is_marked = (rows["inner_num"] > 0) & (rows["inner_base"] >= 0) & (rows["sys_flag"] & SysFlag.INNER_BATCH != 0)
        result: NDArray[np.bool_] = (table == 1) | ((table < 0) & is_marked)
        return result


def _tombstones(layout: StoreLayout) -> dict[str, int]:
    try:
        return load_tombstones(layout)
    except CommitMQError:
        return {}


def _batch_topics(layout: StoreLayout) -> dict[str, bool]:
    try:
        table = load_topics(layout)
    except CommitMQError:
        return {}
    return {name: topic.attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH for name, topic in table.topics.items()}


T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[int, int], None]
"""Called with the bytes of the log done, and all of them."""


class Runner(Protocol):
    """Runs the tasks of a job: this process one after the other, or a cluster in parallel.

    A job divides its work into tasks that change nothing outside of their own places and may be repeated, in any order, in
    any process; a :class:`Runner` runs them. ``work`` and the tasks must be picklable: module functions, plain values.

    ``runner(work, view, tasks, finished)``: the results of ``work(view, task)`` in the order of ``tasks``.

    ``finished`` is called from time to time with the number of finished tasks. An exception of a task is raised again,
    with the same type if it is one of CommitMQ's.
    """

    def __call__(
        self,
        work: Callable[[StoreView, T], R],
        view: StoreView,
        tasks: Sequence[T],
        finished: Callable[[int], None],
    ) -> Iterable[R]: ...


def run_here(
    work: Callable[[StoreView, T], R], view: StoreView, tasks: Sequence[T], finished: Callable[[int], None]
) -> Iterable[R]:
    """Run the tasks one after the other, in this process."""
    for number, task in enumerate(tasks, 1):
        yield work(view, task)
        finished(number)


def silent(*_: Any) -> None:
    """No progress."""
