"""Goal: a write without room is done later, status and log say so once, and other errors are raised as they are.

Method: a DiskRoom whose context records what it is told, and writes that fail as they are asked to.
"""

from __future__ import annotations

import errno
import os

import pytest

from commitmq.errors import DiskFullError, StoreError
from commitmq.files.disk_space import StoppedWithoutRoom
from small_disk import Told, room

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wrapped(cause: Exception) -> StoreError:
    error = StoreError("cannot be written")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error", [FULL, DiskFullError("full"), wrapped(FULL), OSError(errno.EDQUOT, "quota")])
def test_a_write_waits_for_room_and_says_so_once(error: Exception) -> None:
    told = Told()
    fails = [error, error, error]

    def write() -> str:
        if fails:
            assert told.times <= 1
            raise fails.pop()
        assert told.waiting == {"timer log": str(error)}
        return "written"

    assert room(told).wait("timer log", write) == "written"
    assert (told.waiting, told.times, told.pauses) == ({}, 2, 3)


def test_each_file_waits_for_itself() -> None:
    told = Told()
    disk = room(told)

    def full() -> None:
        raise FULL

    assert not disk.try_to("one", full)
    assert not disk.try_to("two", full)
    assert list(told.waiting) == ["one", "two"]
    assert disk.try_to("one", lambda: None)
    assert list(told.waiting) == ["two"]


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "broken"), StoreError("damaged"), wrapped(OSError(errno.EIO, "x"))]
)
def test_another_error_is_raised(error: Exception) -> None:
    told = Told()

    def write() -> None:
        raise error

    for call in (room(told).try_to, room(told).wait):
        with pytest.raises(type(error)) as caught:
            call("timer log", write)
        assert caught.value is error
    assert told.times == 0


def test_a_stop_is_not_held_up() -> None:
    told = Told()
    told.stopping = True

    def write() -> None:
        raise FULL

    with pytest.raises(StoppedWithoutRoom, match="No space"):
        room(told).wait("timer log", write)
