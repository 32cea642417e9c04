"""``pipeline rebuild``: :mod:`commitmq.offline.rebuild_parallel` with Spark; the files equal those of ``store rebuild``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commitmq.config import NodeConfig
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import KINDS, Rebuilt
from commitmq.offline.rebuild_check import checked
from commitmq.offline.rebuild_parallel import rebuild_parallel
from commitmq.store.log.log_split import PIECE_BYTES
from commitmq_plugins.spark.runner import SparkRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rebuild(
    spark: SparkSession,
    stores: Sequence[str | Path],
    *,
    kinds: tuple[str, ...] = KINDS,
    config: NodeConfig | None = None,
    into: str | Path | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Mapping[Path, Rebuilt]:
    """Rebuild ``kinds`` of files of all ``stores``. Executors must see the folders by the same paths, and no other
    program may use them.

    ``into`` is an empty folder, or one to be created, for the files of a single store, which then stays unchanged.
    Raises StoreError, StoreLockedError; CorruptRecordError when a log is damaged; ValueError for several stores with
    ``into``.
    """
    if into is not None and len(stores) != 1:
        raise ValueError("only one store can be rebuilt into a folder")
    runner = SparkRunner(spark)
    done = {}
    for root in map(Path, stores):
        with HeldStore(root, config or NodeConfig(), new_index="index" in kinds) as store:
            target = None if into is None else Path(into).absolute()
            made = rebuild_parallel(store, kinds, runner=runner, into=target, piece_bytes=piece_bytes)
            done[root] = made if target is not None else checked(store, made, kinds, runner=runner)
    return done
