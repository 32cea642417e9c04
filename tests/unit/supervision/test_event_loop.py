"""Goal: a source that rests is not looked at, delays no other, and is looked at afterwards.

Method: two pipes.
"""

from __future__ import annotations

import os
import time

from commitmq.supervision.event_loop import EventLoop


def test_a_source_rests() -> None:
    loop, called = EventLoop(), []
    resting, outlet = os.pipe()
    other, other_outlet = os.pipe()
    try:
        loop.watch(resting, lambda: called.append("resting"), last=True)
        loop.watch(other, lambda: called.append("other"))
        os.write(outlet, b"x")
        os.write(other_outlet, b"x")
        loop.rest(resting, 0.2)
        began = time.monotonic()
        loop.wait(5_000)
        assert called == ["other"]
        os.read(other, 1)
        while "resting" not in called:
            loop.wait(5_000)
        assert 0.2 <= time.monotonic() - began < 4
        loop.rest(resting, 60)
        loop.unwatch(resting)
        called.clear()
        loop.wait(10)
        assert not called
    finally:
        for one in (resting, outlet, other, other_outlet):
            os.close(one)
