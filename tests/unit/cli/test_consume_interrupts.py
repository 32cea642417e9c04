"""Goal: Ctrl-C during ``consume`` commits exactly what was written, whenever it comes.

Method: a consumer that interrupts its own process where the command cannot see it coming: inside of a poll that then returns
a batch, and while a message is written.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from commitmq.cli.consume import _copy, _InterruptedError


class _Consumer:
    """Returns batches of two; the process gets SIGINT within poll number ``at``."""

    def __init__(self, at: int) -> None:
        self.polls = 0
        self.returned: list[str] = []
        self._at = at

    positions: dict[Any, int] = {}

    def poll(self, _timeout_s: float, _most: int) -> list[str]:
        self.polls += 1
        if self.polls == self._at:
            os.kill(os.getpid(), signal.SIGINT)
        batch = [f"{self.polls}a", f"{self.polls}b"]
        self.returned += batch
        return batch


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_batch_that_a_poll_returned_is_written(at: int) -> None:
    consumer = _Consumer(at)
    written: list[Any] = []
    with pytest.raises(_InterruptedError) as found:
        _copy(consumer, written.append, {}, limit=None, follow=True, timeout=1.0)  # type: ignore[arg-type]
    assert found.value.between_batches
    assert written == consumer.returned
    assert consumer.polls == at, "it stops there"


def test_a_batch_that_is_written_in_part_is_told() -> None:
    consumer = _Consumer(0)
    written: list[Any] = []

    def write(message: Any) -> None:
        written.append(message)
        if len(written) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            list(range(10))  # the handler runs

    with pytest.raises(_InterruptedError) as found:
        _copy(consumer, write, {}, limit=None, follow=True, timeout=1.0)  # type: ignore[arg-type]
    assert not found.value.between_batches
    assert written == ["1a", "1b", "2a", "2b", "3a"]
