"""Goal: no damage of a mover's position file ends its process: the file is set aside, and the mover goes on with what is left.

Method: the files as the movers write them, and in the place of one something else: other bytes, other JSON, a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.workers.dispatcher.dispatch_state import DispatchState
from commitmq.workers.pop.recovery import ProgressFile
from commitmq.workers.schedule import progress as schedule
from commitmq.workers.timer import progress as timer

LOG = get_log("test")
FILES: dict[str, Any] = {
    "commitmq/pop.json": ProgressFile,
    "commitmq/schedule.json": schedule.ProgressFiles,
    "config/delayOffset.json": schedule.ProgressFiles,
    "commitmq/timer.json": timer.ProgressFiles,
    "config/timercheck": timer.ProgressFiles,
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "empty": lambda path: path.write_bytes(b""),
    "list": lambda path: path.write_bytes(b"[]"),
    "shape": lambda path: path.write_bytes(b'{"log":"x","offsets":7,"offsetTable":7,"versions":7}'),
}


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    made = StoreLayout(tmp_path)
    made.own.mkdir()
    made.config.mkdir()
    return made


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_it_is_set_aside(layout: StoreLayout, name: str, damage: str) -> None:
    path = layout.root / name
    DAMAGES[damage](path)
    files = FILES[name](layout, LOG)
    files.load()
    assert path.with_name(f"{path.name}.damaged").exists()
    assert not path.exists()
    FILES[name](layout, LOG).load()


def test_pop_reads_the_whole_log_without_its_position(layout: StoreLayout) -> None:
    path = layout.own / "pop.json"
    assert ProgressFile(layout, LOG).load() is None, "a node on which nothing was received yet"
    path.write_bytes(b'{"log":-5}')
    assert ProgressFile(layout, LOG).load() == 0


def test_pop_goes_on_from_the_generation_before(layout: StoreLayout) -> None:
    files = ProgressFile(layout, LOG)
    for log in (100, 200):
        files.store(log)
    (layout.own / "pop.json").write_bytes(b"")
    assert ProgressFile(layout, LOG).load() == 100


def test_a_dispatchers_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.mkdir()
    with pytest.raises(StoreError, match="cannot be read") as error:
        DispatchState.load(path)
    assert str(path) in str(error.value)
