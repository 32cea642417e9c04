"""Runs the tasks of a job: this process one after the other, or a cluster in parallel.

A job divides its work into tasks that change nothing outside of their own places and may be repeated, in any order, in
any process; a :class:`Runner` runs them. ``work`` and the tasks must be picklable: module functions, plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from commitmq.offline.store_view import StoreView

T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[int, int], None]
"""Called with the bytes of the log done, and all of them."""


class Runner(Protocol):
    """``runner(work, view, tasks, finished)``: the results of ``work(view, task)`` in the order of ``tasks``.

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
