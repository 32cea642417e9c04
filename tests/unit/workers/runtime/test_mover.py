"""Goal: the loop of all movers resumes after the writer is lost, copes with what it knows, and no message ends it.

Method: a mover whose turns do what the test says, and exceptions among items that are worked on together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import CorruptRecordError, DiskFullError, InvalidMessageError, ProtocolError, StoreError
from commitmq.workers.runtime.mover import Mover
from commitmq.workers.runtime.run_mover import WriterLost, is_of_message, isolated


class Plan(Mover):
    """Each turn takes the next of ``steps``: an exception is raised, None stops the process."""

    def __init__(self, *steps: Exception | str | None, serves: Callable[[], bool] = lambda: True) -> None:
        self.done: list[str] = []
        self._steps = list(steps)
        log = SimpleNamespace(warning=lambda sentence, **_: self.done.append("lost"))
        context: Any = SimpleNamespace(control=None, log=log, stopping=False)
        way: Any = SimpleNamespace(wait_for_writer=serves)
        aside: Any = SimpleNamespace(write_down=lambda **_: None)
        super().__init__(context, way, aside)

    def resume(self) -> None:
        self.done.append("resume")

    def turn(self) -> None:
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        self.done.append(step or "end")
        self._context.stopping = step is None

    def cope(self, error: Exception) -> bool | None:
        return isinstance(error, KeyError) if isinstance(error, LookupError) else None

    def close(self, *, lost: bool) -> None:
        self.done.append(f"close {lost}")


def test_a_mover_resumes_when_the_writer_was_lost() -> None:
    plan = Plan("a", WriterLost(), "b", None)
    plan.serve()
    assert plan.done == ["resume", "a", "lost", "resume", "b", "end", "close False"]


def test_it_copes_with_what_it_knows_and_dies_of_what_it_does_not() -> None:
    plan = Plan(KeyError("anew"), IndexError("goes on"), "b", None)
    plan.serve()
    assert plan.done == ["resume", "resume", "b", "end", "close False"]
    with pytest.raises(ZeroDivisionError):
        Plan("a", ZeroDivisionError()).serve()


def test_a_process_that_stops_before_the_writer_serves_writes_nothing_down() -> None:
    plan = Plan(serves=lambda: False)
    plan.serve()
    assert plan.done == ["close True"]


@given(st.integers(0, 200), st.sets(st.integers(0, 199)))
def test_only_the_items_on_which_work_fails_are_set_aside(count: int, bad: set[int]) -> None:
    calls: list[int] = []

    def work(items: Sequence[int]) -> list[int]:
        calls.append(len(items))
        if bad & set(items):
            raise ValueError("bad")
        return list(items)

    aside: list[int] = []
    made = isolated(range(count), work, lambda item, error: aside.append(item))
    failing = [item for item in range(count) if item in bad]
    assert (made, aside) == ([item for item in range(count) if item not in bad], failing)
    assert len(calls) <= 1 + 2 * len(failing) * max(count, 1).bit_length()


@pytest.mark.parametrize("error", [OSError(), DiskFullError("x"), StoreError("x"), WriterLost(), MemoryError()])
def test_what_belongs_to_the_process_goes_up(error: Exception) -> None:
    def work(_: Sequence[int]) -> list[int]:
        raise error

    with pytest.raises(type(error)):
        isolated([1, 2, 3], work, lambda *_: None)
    assert not is_of_message(error)


@pytest.mark.parametrize(
    "error",
    [InvalidMessageError("x"), CorruptRecordError("x"), KeyError(), OverflowError(), UnicodeError(), TypeError()],
)
def test_what_belongs_to_a_message_is_told(error: Exception) -> None:
    assert is_of_message(error)
    assert not is_of_message(ProtocolError("X", "y"))
