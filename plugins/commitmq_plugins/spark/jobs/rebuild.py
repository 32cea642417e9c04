"""``pipeline rebuild``: :mod:`commitmq.offline.rebuild_parallel` with Spark; the files equal those of ``store rebuild``.

Runs the tasks of an offline job on Spark: see :mod:`commitmq.offline.held_store`.

A task is a plain value, and its work is a function of an installed module, so executors need only the package. A
CommitMQError (a damaged log, a full disk) would repeat at every try: it comes back as a result and is raised here.
Spark retries every other failure.

``pipeline verify``: :mod:`commitmq.offline.verify` with its pieces checked in parallel; the report is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from commitmq import errors
from commitmq.config import NodeConfig
from commitmq.errors import CommitMQError, StoreError
from commitmq.offline.extents import PIECE_BYTES
from commitmq.offline.findings import Report
from commitmq.offline.held_store import HeldStore, StoreView
from commitmq.offline.rebuild import KINDS, Rebuilt
from commitmq.offline.rebuild_parallel import checked, rebuild_parallel
from commitmq.offline.verify import verify as work
from commitmq.store.access import private_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


T = TypeVar("T")
R = TypeVar("R")

# Starting a Spark task takes about 25 ms and a piece of the log 80: one Spark task takes several pieces, unless they
# are few.
_SLICES_A_CORE: Final = 4
_TASKS_A_SLICE: Final = 8


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: str
    message: str


class SparkRunner:
    """Runs tasks in parallel on ``spark``; a :class:`commitmq.offline.held_store.Runner`."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext

    def __call__(
        self, work: Callable[[StoreView, T], R], view: StoreView, tasks: Sequence[T], finished: Callable[[int], None]
    ) -> list[R]:
        if not tasks:
            return []
        least = _SLICES_A_CORE * self._context.defaultParallelism
        slices = min(len(tasks), max(least, len(tasks) // _TASKS_A_SLICE))
        results: list[Any] = self._context.parallelize(tasks, slices).mapPartitions(partial(_do, work, view)).collect()
        for one in results:
            if isinstance(one, _Failure):
                kind = getattr(errors, one.kind, StoreError)
                raise (kind if issubclass(kind, StoreError) and kind is not errors.StoreLockedError else StoreError)(
                    one.message
                )
        finished(len(tasks))
        return results


def _do(work: Callable[[StoreView, T], R], view: StoreView, tasks: Iterable[T]) -> Iterator[R | _Failure]:
    for task in tasks:
        try:
            with private_files(view.root):
                result = work(view, task)
            yield result
        except CommitMQError as error:
            yield _Failure(type(error).__name__, str(error))


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
