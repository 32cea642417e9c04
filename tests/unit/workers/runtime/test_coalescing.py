"""Goal: little work that nobody waits for is left lying for the long pause, and nothing else is.

Method: a real control block, a clock that the test moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from commitmq.config import NodeConfig, from_mapping
from commitmq.control import ControlBlock, WorkerWord, role_slot
from commitmq.workers.runtime import coalescing as pauses
from commitmq.workers.runtime.coalescing import LITTLE_BYTES, CoalescingDelay


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pauses, "time", SimpleNamespace(monotonic=made))
    monkeypatch.setattr(pauses, "monotonic_ms", lambda: int(made.now_s * 1000))
    return made


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlBlock]:
    block = ControlBlock(tmp_path / "block", create=True)
    yield block
    block.close()


def config(short_us: int = 300, long_us: int = 10_000, readers: int = 2) -> NodeConfig:
    dispatch = {"coalesce_us": short_us, "unawaited_coalesce_us": long_us}
    return from_mapping({"dispatch": dispatch, "reader": {"count": readers}})


def await_until(control: ControlBlock, ms: int, reader: int = 0) -> None:
    control.put_worker(role_slot(f"reader-{reader}"), WorkerWord.AWAITED_UNTIL_MS, ms)


def after_a_turn(control: ControlBlock, clock: Clock, made_of: NodeConfig, work_bytes: int = 100) -> CoalescingDelay:
    made = CoalescingDelay(control, made_of)
    made.look()
    assert made.left_s() <= 0  # nothing was done yet
    clock.now_s += 0.010
    made.done(work_bytes)
    return made


def test_nobody_waits(control: ControlBlock, clock: Clock) -> None:
    made = after_a_turn(control, clock, config())
    assert made.left_s() == pytest.approx(0.010)
    clock.now_s += 0.004
    assert made.left_s(LITTLE_BYTES - 1) == pytest.approx(0.006)
    clock.now_s += 0.007
    assert made.left_s() < 0


@pytest.mark.parametrize("reader", [0, 1])
def test_somebody_waits(control: ControlBlock, clock: Clock, reader: int) -> None:
    await_until(control, 1 << 62, reader)
    made = after_a_turn(control, clock, config())
    assert made.left_s() == pytest.approx(0.0003)


def test_readers_that_the_node_does_not_have_are_not_asked(control: ControlBlock, clock: Clock) -> None:
    await_until(control, 1 << 62, reader=1)
    made = after_a_turn(control, clock, config(readers=1))
    assert made.left_s() == pytest.approx(0.010)


def test_one_who_is_expected_back(control: ControlBlock, clock: Clock) -> None:
    made = after_a_turn(control, clock, config())
    await_until(control, int(clock.now_s * 1000) + 50)
    made.look()
    assert made.left_s() == pytest.approx(0.0003)
    clock.now_s += 0.060
    made.look()
    made.done(100)
    assert made.left_s() == pytest.approx(0.010)


def test_one_who_begins_to_wait_is_noticed_before_the_sleep(control: ControlBlock, clock: Clock) -> None:
    made = after_a_turn(control, clock, config())
    assert not made.is_late()
    await_until(control, 1 << 62)
    assert made.is_late()
    made.look()
    assert not made.is_late()  # known, so the wait need not become a look each time


def test_much_work_is_not_left_lying(control: ControlBlock, clock: Clock) -> None:
    made = after_a_turn(control, clock, config())
    assert made.left_s(LITTLE_BYTES) == pytest.approx(0.0003)


@pytest.mark.parametrize(
    ("work_bytes", "pause_s"),
    [(LITTLE_BYTES // 2, 0.010), (LITTLE_BYTES * 2, 0.005), (LITTLE_BYTES * 100, 0.0003)],
)
def test_a_pause_ends_when_much_will_have_come(
    control: ControlBlock, clock: Clock, work_bytes: int, pause_s: float
) -> None:
    made = after_a_turn(control, clock, config())
    clock.now_s += 0.010
    made.done(work_bytes)
    assert made.left_s() == pytest.approx(pause_s)


def test_limits(control: ControlBlock, clock: Clock) -> None:
    """The long pause is never the shorter one, and a loop that cannot sleep as shortly says so."""
    assert after_a_turn(control, clock, config(short_us=20_000)).left_s() == pytest.approx(0.020)
    assert after_a_turn(control, clock, config(long_us=0)).left_s() == pytest.approx(0.0003)
    made = CoalescingDelay(control, config(long_us=0), least_s=0.001)
    made.done(100)
    assert made.left_s() == pytest.approx(0.001)
