"""Goal: a node says that it takes sends only while its writer works. Method: a control block and its states, no processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, DiskFlag, Word, WorkerState, WorkerWord, role_slot
from commitmq_plugins.metrics.figures import Health

ROLES = (
    "coordinator",
    "dispatcher-consume_queue",
    "reput",
    "flush",
    "allocate",
    "writer",
    "cleanup",
    "dispatcher-memory",
)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlBlock]:
    made = ControlBlock(tmp_path / "control", create=True)
    config = NodeConfig()
    for role in (*ROLES, *(f"reader-{number}" for number in range(config.reader.count))):
        slot = role_slot(role)
        made.put_worker(slot, WorkerWord.STATE, WorkerState.READY)
        made.put_worker(slot, WorkerWord.PID, os.getpid())
        made.put_worker(slot, WorkerWord.HEARTBEAT_MS, time.monotonic_ns() // 1_000_000)
    yield made
    made.close()


def health_of(control: ControlBlock) -> Health:
    return Health(MagicMock(config=NodeConfig(), control=control, slot_of=role_slot))


def test_a_node_whose_processes_work_takes_sends(control: ControlBlock) -> None:
    assert health_of(control).answer() == {"ready": True, "reasons": [], "takes_sends": True, "notes": []}


@pytest.mark.parametrize(
    ("word", "value", "reason"),
    [
        (WorkerWord.STATE, WorkerState.STARTING, "the process writer is not ready"),
        (WorkerWord.PID, 0, "the process writer is not ready"),
        (WorkerWord.HEARTBEAT_MS, 0, "the loop of writer has not turned for"),
    ],
)
def test_a_node_without_its_writer_takes_no_sends(
    control: ControlBlock, word: WorkerWord, value: int, reason: str
) -> None:
    control.put_worker(role_slot("writer"), word, value)
    told = health_of(control).answer()
    assert (told["ready"], told["takes_sends"]) == (False, False)
    assert str(told["reasons"]).startswith(f"['{reason}")


def test_a_node_without_a_reader_takes_sends_but_is_not_ready(control: ControlBlock) -> None:
    control.put_worker(role_slot("reader-0"), WorkerWord.PID, 0)
    told = health_of(control).answer()
    assert (told["ready"], told["takes_sends"]) == (False, True)


def test_a_full_disk_takes_no_sends(control: ControlBlock) -> None:
    control.put(Word.DISK_FLAGS, next(iter(DiskFlag)))
    assert health_of(control).answer()["takes_sends"] is False
