"""Goal: no damage of a mover's position file ends its process: the file is set aside, and the mover goes on with what is
left; a dispatcher begins anew. What stands where a file is to be written makes way.

Method: the files as the movers write them, and in the place of one something else: other bytes, other JSON, a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.workers.dispatcher.dispatch_state import DispatchState
from commitmq.workers.pop.recovery import ProgressFile
from commitmq.workers.schedule import progress as schedule
from commitmq.workers.timer import progress as timer

LOG = get_log("test")
FILES: dict[str, Any] = {
    "commitmq/pop.json": ProgressFile,
    "commitmq/schedule.json": schedule.ScheduleProgressFiles,
    "config/delayOffset.json": schedule.ScheduleProgressFiles,
    "commitmq/timer.json": timer.TimerProgressFiles,
    "config/timercheck": timer.TimerProgressFiles,
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


_FAR = b'{"position":1e300,"timestamp":0,"epoch":0,"clean":true,"skipped":[],"gaps":[],"cut_to":0}'
DISPATCHER_DAMAGES: dict[str, Callable[[Path], object]] = {**DAMAGES, "far": lambda path: path.write_bytes(_FAR)}


@pytest.mark.parametrize("damage", DISPATCHER_DAMAGES)
def test_a_dispatcher_begins_anew_and_goes_back_to_a_cut(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "index.json"
    DISPATCHER_DAMAGES[damage](path)
    state = DispatchState.load(path, LOG)
    assert state == DispatchState(path)
    assert path.with_name("index.json.damaged").exists()
    state.lower(700)
    assert DispatchState.load(path, LOG).cut_to == 700


@pytest.mark.parametrize("name", ["pop.json.bak", "pop.json.new"])
def test_a_folder_in_the_place_of_a_file_to_be_written_makes_way(layout: StoreLayout, name: str) -> None:
    files = ProgressFile(layout, LOG)
    files.store(100)
    (layout.own / name).mkdir()
    files.store(200)
    assert ProgressFile(layout, LOG).load() == 200
    assert (layout.own / f"{name}.damaged").is_dir()
