"""Goal: an ended ``commitmq produce`` has read all input that came before the signal.

Method: a pipe, and a look at it that is late.
"""

from __future__ import annotations

import os
import select
import signal
from typing import Any

import pytest

from commitmq.cli.produce import StopSignals, input_lines


def test_input_that_came_before_the_signal_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command looks, and finds nothing. Then input comes, and then the signal; only then the command goes on."""
    inlet, outlet = os.pipe()
    ending = StopSignals()
    look = select.select

    def late(*arguments: Any) -> Any:
        found = look(*arguments)
        if ending.signal is None:
            os.write(outlet, b"one\ntwo\nhal")
            ending.signal = signal.SIGINT
        return found

    try:
        with ending:
            monkeypatch.setattr(select, "select", late)
            lines = list(input_lines(inlet, lambda _bytes: None, ending))
    finally:
        os.close(inlet)
        os.close(outlet)
    assert [line for _, line in lines if line is not None] == [b"one", b"two"]
    assert ending.left_out
