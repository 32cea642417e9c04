"""Work in steps, between which an event loop can serve others.

A :data:`Steps` is a generator: it yields after each step, of a fraction of a millisecond, and returns what the work gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Final, TypeVar

_Found = TypeVar("_Found")
_Item = TypeVar("_Item")
Steps = Generator[None, None, _Found]

_ITEMS: Final = 64
_SLICE_S: Final = 0.003
"""How long an event loop's turn may do steps: others wait so long."""


def in_steps(items: Iterable[_Item]) -> Generator[_Item | None]:
    """``items``, and None where a step ends. No item may be None."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % _ITEMS:
            yield None


def finish(steps: Steps[_Found]) -> _Found:
    """Do all the steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: _Found = done.value
            return found


def begin(steps: Steps[_Found]) -> tuple[_Found] | None:
    """Do the steps of one turn; what the work gives, if that was all."""
    end = time.perf_counter() + _SLICE_S
    try:
        while time.perf_counter() < end:
            next(steps)
    except StopIteration as done:
        return (done.value,)
    return None


async def beside_others(steps: Steps[_Found]) -> _Found:
    """Do the steps in turns of the event loop. What they make stays: Python's collector, which would look at all of it again
    and again for a tenth of a second while it grows, never does.
    """
    with _uncollected():
        while (found := begin(steps)) is None:
            await asyncio.sleep(0)
    return found[0]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    if not gc.isenabled():
        yield
        return
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
