"""Goal: what a recovery takes from the ConsumeQueues is vouched for by neither sidecar nor checkpoint, before it is taken.

Method: the files as a node left them that was killed, and the part of recovery that writes down what it found.
"""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.config import from_mapping
from commitmq.errors import StoreError
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.store.recovery.store_recovery import Recovered
from commitmq.workers import recovery
from queue_store import QueueStore

SEGMENT_BYTES = 65_536


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    """Four segments of a record a second."""
    store = QueueStore(tmp_path / "store", segment_bytes=SEGMENT_BYTES)
    store.topic("orders", 1)
    for number in range(45):
        store.put("orders", 0, b"x" * 5_000, timestamp=1_000 * (number + 1))
    assert store.end > 3 * SEGMENT_BYTES
    Sidecar(store.end, 40_000, store.end, -1, SEGMENT_BYTES, 1, 0).save_with(
        store.layout.sidecar, Checkpoint(40_000, 39_000, 38_000), store.layout.checkpoint
    )
    return store


def remember(store: QueueStore, redispatch_from: int) -> None:
    log = SimpleNamespace(warning=lambda *_, **__: None)
    control = SimpleNamespace(get=lambda _word: -1)
    config = from_mapping({"commit_log": {"segment_bytes": SEGMENT_BYTES}})
    context: Any = SimpleNamespace(layout=store.layout, config=config, control=control, log=log, params={"owner": 2})
    found: Any = SimpleNamespace(
        end=store.end, last_timestamp=40_000, redispatch_from=redispatch_from, by_sidecar=True, allowed=False
    )
    assert {"end", "last_timestamp", "redispatch_from", "by_sidecar", "allowed"} <= set(Recovered.__annotations__)
    recovery._remember(context, found)


@pytest.mark.parametrize(("redispatch_from", "logics"), [(SEGMENT_BYTES + 7, 13_000), (0, 1_000), (None, 39_000)])
def test_rocketmq_begins_no_later_than_the_queues_are_cut(
    store: QueueStore, redispatch_from: int | None, logics: int
) -> None:
    remember(store, store.end if redispatch_from is None else redispatch_from)
    assert Checkpoint.load(store.layout.checkpoint).logics_msg_timestamp == logics


def test_a_fall_that_cannot_be_written_down_refuses_the_start(
    store: QueueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Sidecar, "save_with", refused)
    with pytest.raises(StoreError, match="cannot write down that the ConsumeQueues"):
        remember(store, SEGMENT_BYTES)
    remember(store, store.end)  # nothing falls: what is there stays right
