"""Goal: the record of where the queues end never promises files that are about to go.

Method: each step of writing and removing it errs, and what is left on the disk is read again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.store.queues import queue_ends
from commitmq.store.queues.queue_ends import PLAIN, QueueEnd, QueueEnds


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def arm(text: str) -> None:
        monkeypatch.setattr(failpoints, "_points", failpoints.parse(text))
        monkeypatch.setattr(failpoints, "ACTIVE", True)

    return arm


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "commitmq" / "queue_ends"
    QueueEnds(1000, 0, -1, [QueueEnd(PLAIN, "orders", 0, 0, 400, 20, 990)]).save(made)
    return made


def found(path: Path) -> QueueEnds:
    ends = QueueEnds.load(path)
    assert ends is not None
    return ends


def test_an_expiry_is_noted_before_files_go(path: Path) -> None:
    queue_ends.expect_expiry(path, 500)
    queue_ends.expect_expiry(path, 300)  # less than is known already
    assert found(path).expires_below == 500
    assert found(path).queues == [QueueEnd(PLAIN, "orders", 0, 0, 400, 20, 990)]


@pytest.mark.parametrize("step", ["queue_ends.write", "disk.sync.queue_ends:before", "disk.replace.queue_ends:before"])
def test_where_an_expiry_cannot_be_noted_the_record_goes(path: Path, armed: Callable[[str], None], step: str) -> None:
    armed(f"{step}=errno:ENOSPC")
    queue_ends.expect_expiry(path, 500)
    assert not path.exists()


@pytest.mark.parametrize("side", ["before", "after"])
def test_an_expiry_that_can_be_neither_noted_nor_forgotten_is_refused(
    path: Path, armed: Callable[[str], None], side: str
) -> None:
    armed(f"queue_ends.write=errno:ENOSPC;disk.unlink.queue_ends:{side}=errno:EIO")
    with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
        queue_ends.expect_expiry(path, 500)
    assert path.exists() == (side == "before")


def test_a_record_that_is_not_there_is_forgotten_already(path: Path) -> None:
    queue_ends.forget(path)
    queue_ends.forget(path)
    queue_ends.expect_expiry(path, 500)
    assert QueueEnds.load(path) is None
