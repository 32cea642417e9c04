"""Goal: a place that somebody learnt before cuts of the log is lowered to where the log still was as it had been, and no place
that is right moves.

Method: random lives of a log that grows, is cut, and is written to again, with places learnt at any moment; the model knows of
each byte in which life of the log it was written. Then the file: what it says after a restart, damaged, and in a copy.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.store.layout import StoreLayout
from commitmq.store.recovery import cut_history
from commitmq.store.recovery.cut_history import (
    MOST_CUTS,
    NO_CUT,
    CutHistory,
    Lowered,
    note_cut,
    note_restored,
)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(1, 20)),
        st.tuples(st.just("cut"), st.integers(0, 30)),
        st.tuples(st.just("learn"), st.integers(0, 30)),
    ),
    max_size=60,
)


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    layout = StoreLayout(tmp_path / "store")
    layout.own.mkdir(parents=True)
    return layout


@given(STEPS, st.integers(2, 6))
def test_a_place_is_lowered_to_what_is_as_it_was(steps: list[tuple[str, int]], most: int) -> None:
    history, writes = CutHistory(), 0
    log: list[int] = []
    learnt: list[tuple[int, list[int]]] = []  # generation, the log below the place at that time
    history.add(0, "first use")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_history, "MOST_CUTS", most)
        for step, number in steps:
            if step == "grow":
                log += range(writes, writes + number)
                writes += number
            elif step == "cut":
                del log[max(0, len(log) - number) :]
                history.add(len(log), "recovery")
            else:
                learnt.append((history.generation, log[: max(0, len(log) - number)]))
    assert len(history.cuts) <= most
    generations = [one.generation for one in history.cuts]
    assert generations == sorted(set(generations))
    for generation, below in learnt:
        end = history.end_since(generation)
        place = len(below) if end == NO_CUT else min(len(below), end)
        same = 0
        while same < len(below) and same < len(log) and log[same] == below[same]:
            same += 1
        assert place <= same, "behind it lies what this place never was"
        if history.total <= most:
            assert place == min(len(below), same) or end < same, "a right place moved"


def test_exact_without_merging() -> None:
    history = CutHistory()
    known = [history.add(end, "recovery").generation for end in (100, 50, 70)]
    assert [history.end_since(one) for one in (0, *known)] == [50, 50, 70, NO_CUT]
    assert history.end_since(known[-1] + 1) == 50, "of another copy of the store: every cut counts"
    assert known == sorted(known)
    assert known[0] >= time.time_ns() // 1_000_000 - 60_000


def test_the_oldest_become_one() -> None:
    history = CutHistory()
    first = history.add(7, "first use").generation
    for number in range(MOST_CUTS + 3):
        history.add(1_000 + number, "recovery")
    assert len(history.cuts) == MOST_CUTS
    assert history.total == MOST_CUTS + 4
    assert history.end_since(0) == 7
    assert history.end_since(first) == 7, "sent back further than necessary"
    assert history.end_since(history.cuts[0].generation) == 1_000 + 4


def test_the_file_says_all_of_it(layout: StoreLayout) -> None:
    assert CutHistory.load(layout) == CutHistory()
    history = CutHistory()
    history.add(100, "first use")
    history.add(50, "repair --cut", 12)
    assert history.pending_end == 50
    history.has_lowered(Lowered(2, 3, 40))
    history.save(layout)
    found = CutHistory.load(layout)
    assert found == history
    assert found.pending_end == NO_CUT
    assert found.cuts[-1].to_json() == {
        "generation": history.generation,
        "time_ms": history.cuts[-1].time_ms,
        "by": "repair --cut",
        "end": 50,
        "cut_id": 12,
        "lowered": {"groups": 2, "positions": 3, "messages": 40},
    }


def test_a_damaged_file_counts_as_none(layout: StoreLayout) -> None:
    history = CutHistory()
    history.add(100, "first use")
    history.save(layout)
    good = layout.cut_history.read_bytes()
    for at in range(len(good)):
        layout.cut_history.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert CutHistory.load(layout) == CutHistory(), at
    for size in range(len(good)):
        layout.cut_history.write_bytes(good[:size])
        assert CutHistory.load(layout) == CutHistory(), size


def _saved(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch, *, ago_ms: int = 0) -> CutHistory:
    history = CutHistory()
    history.add(100, "first use")
    now_ms = cut_history._now_ms()
    with monkeypatch.context() as patch:
        patch.setattr(cut_history, "_now_ms", lambda: now_ms - ago_ms)
        history.save(layout)
    layout.sidecar.write_bytes(b"x")
    return history


def test_a_copy_of_the_folder_is_told_from_it(
    layout: StoreLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(layout, monkeypatch)
    copy = StoreLayout(tmp_path / "copy")
    shutil.copytree(layout.root, copy.root)
    assert CutHistory.load(copy).is_copy
    moved = StoreLayout(layout.root.rename(tmp_path / "moved"))
    assert not CutHistory.load(moved).is_copy


@pytest.mark.parametrize("restored", ["all", "what differs"])
def test_a_copy_in_the_place_of_the_original_is_told_from_it(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch, restored: str
) -> None:
    """Where a folder is removed, a new one often has its inode; and a program that copies what differs keeps the folder."""
    _saved(layout, monkeypatch, ago_ms=3_600_000 if restored == "all" else 0)
    if restored == "what differs":
        os.utime(layout.sidecar, (1, 1))
    assert CutHistory.load(layout).is_copy
    CutHistory.load(layout).save(layout)  # an offline verb before the first start
    layout.sidecar.write_bytes(b"x")
    assert CutHistory.load(layout).is_copy
    history = CutHistory.load(layout)
    history.add(100, "copied store")
    history.save(layout)
    assert not CutHistory.load(layout).is_copy


def test_a_cut_is_noted_once_and_taken_back(layout: StoreLayout) -> None:
    note_cut(layout, 500, "repair --cut", 3)
    note_cut(layout, 400, "repair --cut", 4)
    note_cut(layout, 400, "repair --cut", 4)
    found = CutHistory.load(layout)
    assert (found.total, found.pending_end) == (2, 400)
    note_restored(layout, 4)
    assert CutHistory.load(layout).pending_end == 500
    assert CutHistory.load(layout).generation == found.generation
    note_restored(layout, 5)
    note_restored(layout, 3)
    assert CutHistory.load(layout).pending_end == NO_CUT


def test_a_folder_in_its_place_counts_as_none(layout: StoreLayout) -> None:
    layout.cut_history.mkdir(parents=True)
    history = CutHistory.load(layout)
    assert history == CutHistory()
    history.add(100, "first use")
    history.save(layout)
    assert CutHistory.load(layout).cuts == history.cuts
