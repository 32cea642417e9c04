"""Goal: a mover finds what it moved, whoever wrote the copy, and looks only when the queues have all of the log.

Method: records by the project's encoder with their properties in every order; a control block of its own, whose words the test
moves while the mover waits.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.control import ControlBlock, DispatcherWord, WorkerState, WorkerWord, role_slot
from commitmq.format.record import Record, encode_record
from commitmq.workers.runtime.run_mover import RunMover, WriterLost, key_of

PROPERTIES = {"DELAY": "2", "REAL_QID": "1", "REAL_TOPIC": "Later", "UNIQ_KEY": "D6D8", "a": "1", "b": "x"}


def stored(properties: dict[str, str]) -> bytes:
    return encode_record(Record("Later", 1, properties=properties, body=b"body"))


@given(st.permutations(list(PROPERTIES)))
def test_the_order_of_properties_does_not_count(order: list[str]) -> None:
    assert key_of(stored({name: PROPERTIES[name] for name in order})) == key_of(stored(PROPERTIES))


@pytest.mark.parametrize("name", PROPERTIES)
def test_each_property_counts(name: str) -> None:
    others = {one: value for one, value in PROPERTIES.items() if one != name}
    assert key_of(stored(others)) != key_of(stored(PROPERTIES))
    assert key_of(stored({**others, name: "other"})) != key_of(stored(PROPERTIES))


def mover(path: Path, on_wait: Any) -> tuple[RunMover, ControlBlock]:
    control = ControlBlock(path / "control", create=True)
    context = SimpleNamespace(control=control, stopping=False)
    context.wait = lambda _ms: on_wait(control, context)
    return RunMover(cast(Any, context)), control


def test_it_waits_for_the_queues(tmp_path: Path) -> None:
    def advance(control: ControlBlock, _context: object) -> None:
        control.put_dispatcher(0, DispatcherWord.DISPATCHED, control.dispatcher(0, DispatcherWord.DISPATCHED) + 40)

    one, control = mover(tmp_path, advance)
    control.put_worker(role_slot("writer"), WorkerWord.STATE, WorkerState.READY)
    one.wait_until_dispatched(100)
    assert control.dispatcher(0, DispatcherWord.DISPATCHED) == 120
    control.close()


def test_a_stop_or_a_lost_writer_ends_the_wait(tmp_path: Path) -> None:
    one, control = mover(tmp_path, lambda _control, context: setattr(context, "stopping", True))
    with pytest.raises(WriterLost):
        one.wait_until_dispatched(100)
    control.put_worker(role_slot("writer"), WorkerWord.STATE, WorkerState.READY)
    one.wait_until_dispatched(100)
    assert control.dispatcher(0, DispatcherWord.DISPATCHED) == 0
    control.close()
