"""Who does the tasks of a job: this process one after the other, or a cluster side by side.

A job cuts its work into tasks that change nothing outside of their own places and may be done again, in any order, in
any process; a :class:`Runner` gets them done. ``work`` and the tasks must be picklable: functions of modules, plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from commitmq.offline.store_view import StoreView

T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[int, int], None]
"""Called with bytes of the log done and in all."""


class Runner(Protocol):
    """``runner(work, view, tasks, finished)``: the results of ``work(view, task)`` in the order of ``tasks``.

    ``finished`` is called now and then with how many tasks are done. What a task raises is raised, as the same kind of
    error where it is one of ours.
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
    """One after the other, in this process."""
    for number, task in enumerate(tasks, 1):
        yield work(view, task)
        finished(number)


def silent(*_: Any) -> None:
    """No progress."""
