"""The data about a held store that a task needs: plain values that can be sent to another process.

Tasks read the store itself by its path, so a process on another machine must see the same folder there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from commitmq.config import NodeConfig
from commitmq.errors import CommitMQError
from commitmq.format.constants import SysFlag
from commitmq.kernels.codes import ROW
from commitmq.offline.held_store import HeldStore
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.store.metadata.deleted_topics import load_tombstones
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH
from commitmq.store.metadata.topic_files import load_topics

_MAPS = 2  # a task reads only one segment


@dataclass(frozen=True, slots=True)
class StoreView:
    """``bases`` are the base offsets of the log's segments, ``deleted`` the tombstones of deleted topics.

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
