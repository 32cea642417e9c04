"""Runs the tasks of an offline job on Spark: see :mod:`commitmq.offline.runner`.

A task is a plain value, and its work is a function of an installed module, so executors need only the package. A
CommitMQError (a damaged log, a full disk) would repeat at every try: it comes back as a result and is raised here.
Spark retries every other failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from commitmq import errors
from commitmq.errors import CommitMQError, StoreError
from commitmq.offline.store_view import StoreView
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
    """Runs tasks in parallel on ``spark``; a :class:`commitmq.offline.runner.Runner`."""

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
