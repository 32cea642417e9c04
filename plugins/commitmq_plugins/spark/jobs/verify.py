"""``pipeline verify``: :mod:`commitmq.offline.verify` with its pieces checked in parallel; the report is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commitmq.config import NodeConfig
from commitmq.offline.findings import Report
from commitmq.offline.held_store import HeldStore
from commitmq.offline.verify import verify as work
from commitmq.store.log.log_split import PIECE_BYTES
from commitmq_plugins.spark.runner import SparkRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def verify(
    spark: SparkSession,
    stores: Sequence[str | Path],
    *,
    config: NodeConfig | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Mapping[Path, Report]:
    """Read all of ``stores`` and compare log, queues and index. Executors must see the folders by the same paths, and
    no other program may use them. Raises StoreError or StoreLockedError.
    """
    runner = SparkRunner(spark)
    reports = {}
    for root in map(Path, stores):
        with HeldStore(root, config or NodeConfig()) as store:
            reports[root] = work(store, runner=runner, piece_bytes=piece_bytes)
    return reports
