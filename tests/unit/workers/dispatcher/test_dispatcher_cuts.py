"""Goal: a dispatcher goes back to where the log was cut, also when the log has grown past that since, and only then.

Method: the step of a host behind ``open``, with the state that recovery has lowered; the dispatcher notes what it is told.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.log import get_log
from commitmq.workers.dispatcher.dispatch_host import DispatcherHost
from commitmq.workers.dispatcher.dispatch_state import DispatchState

LOG = get_log("test")


class Host(DispatcherHost):
    """Without a process, on a log that ends at 1000."""

    def __init__(self, state: DispatchState) -> None:
        self.state = state
        self._control = SimpleNamespace(committed=lambda: 1_000)  # type: ignore[assignment]
        self.context = SimpleNamespace(log=LOG)  # type: ignore[assignment]
        self.told: list[int] = []

    def opened_at(self, position: int) -> int:
        return self._within_the_log(SimpleNamespace(truncate=self.told.append), position)


@pytest.mark.parametrize(
    ("cut_to", "opened_at", "goes_back_to", "left"),
    [
        (-1, 900, None, -1),
        (-1, 1_001, 1_000, -1),
        (700, 900, 700, 700),
        (700, 700, None, -1),
        (1_200, 1_100, 1_000, 1_200),
    ],
)
def test_it_goes_back(tmp_path: Path, cut_to: int, opened_at: int, goes_back_to: int | None, left: int) -> None:
    path = tmp_path / "mine.json"
    host = Host(DispatchState(path, 500, cut_to=cut_to))
    host.state.save()  # type: ignore[union-attr]
    assert host.opened_at(opened_at) == (opened_at if goes_back_to is None else goes_back_to)
    assert host.told == ([] if goes_back_to is None else [goes_back_to])
    assert DispatchState.load(path, LOG).cut_to == left, "until it has flushed, a death may bring the old files back"


def test_a_second_cut_keeps_the_lower_end(tmp_path: Path) -> None:
    state = DispatchState(tmp_path / "mine.json", 500)
    assert not state.lower(700)
    assert state.lower(400)
    assert not state.lower(600)
    assert (state.position, state.cut_to) == (400, 400)


def _impossible(_offset: int) -> None:
    raise NotImplementedError


@pytest.mark.parametrize("methods", [{}, {"truncate": _impossible}])
def test_one_that_cannot_go_back_goes_on(tmp_path: Path, methods: dict[str, Any]) -> None:
    host = Host(DispatchState(tmp_path / "mine.json", 500, cut_to=700))
    assert host._within_the_log(SimpleNamespace(**methods), 900) == 700
