"""Goal: what a repair or a start cut from the log comes back byte for byte, unless messages lie in its place by now; a
restoration can be killed anywhere and run again, and run once more it does nothing.

Method: RocketMQ's clean store, damaged in its middle or at its end; the log before and after as bytes, and verify.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq.config import load
from commitmq.errors import StoreError
from commitmq.offline.held_store import HeldStore
from commitmq.offline.repair import How, repair, restore
from commitmq.offline.verify import verify
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.recovery import cut_record
from commitmq.supervision.exit_codes import CliExit
from golden_stores import GoldenStore
from nodes import commitmq
from shares import shared

SETTINGS = ("index.hash_slots=200", "index.max_items=500")
SEGMENT_BYTES = 131_072


@pytest.fixture
def clean(golden_copy: Callable[[str], GoldenStore]) -> GoldenStore:
    return golden_copy("clean")


def held(store: GoldenStore) -> HeldStore:
    return HeldStore(store.root, load(None, SETTINGS))


def segments(store: GoldenStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.layout.commit_log.iterdir())}


def offsets(store: GoldenStore) -> list[int]:
    log = CommitLog(store.layout.commit_log, SEGMENT_BYTES)
    try:
        return [record.physical_offset for record in log.iter_records()]
    finally:
        log.close()


def damaged(store: GoldenStore) -> int:
    """Break a record in the middle of the first segment; returns where it begins."""
    hit = [one for one in store.messages if one["topic"] == "GoldenNormal" and one["physical_offset"] < 120_000][60]
    path = store.layout.commit_log / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(hit["physical_offset"] + 100)
        file.write(b"\xff\xfe\xfd")
    return int(hit["physical_offset"])


def mended(store: GoldenStore, how: How) -> None:
    with held(store) as locked:
        repair(locked, how)
        assert verify(locked).is_sound


@pytest.mark.parametrize("how", ["cut", "skip"])
def test_what_a_repair_took_out_comes_back(clean: GoldenStore, how: How) -> None:
    damaged(clean)
    before = segments(clean)
    mended(clean, how)
    assert segments(clean) != before
    with held(clean) as store:
        done = restore(store)
        assert done.cut is not None
        assert done.cut.by == f"repair --{how}"
        assert len(done.damage) == 1, "the damage is back, too"
        assert restore(store).cut is None, "a second time there is nothing to do"
    assert segments(clean) == before
    # And the other way out is open again.
    mended(clean, "skip")


def test_records_that_were_cut_are_read_again(clean: GoldenStore) -> None:
    """A cut of whole records, such as one that was made in the wrong place: its restoration leaves a sound store."""
    before, wanted = segments(clean), offsets(clean)
    where = damaged(clean)
    first = clean.layout.commit_log / f"{0:020d}"
    mended(clean, "cut")
    assert offsets(clean) == [one for one in wanted if one < where]
    # The bytes that broke the record are mended in the copy, as a person might who has them elsewhere.
    cut = cut_record.load(clean.layout)[-1]
    part = cut.parts[0]
    copy = cut_record.cut_folder(clean.layout) / part.copy
    broken = copy.read_bytes()
    copy.write_bytes(before[first.name][part.start : part.start + part.size])
    with held(clean) as store, pytest.raises(StoreError, match="copy of the cut bytes is missing or damaged"):
        restore(store)
    copy.write_bytes(broken)
    with held(clean) as store:
        restore(store)
    first.write_bytes(before[first.name])
    rebuilt = commitmq("store", "rebuild", str(clean.root), *(part for one in SETTINGS for part in ("--set", one)))
    assert rebuilt.returncode == CliExit.OK, rebuilt.stdout + rebuilt.stderr
    assert offsets(clean) == wanted


def test_what_was_stored_since_is_not_overwritten(clean: GoldenStore) -> None:
    where = damaged(clean)
    mended(clean, "cut")
    first = clean.layout.commit_log / f"{0:020d}"
    data = bytearray(first.read_bytes())
    data[where : where + 8] = b"\0\0\0\x99new!"
    first.write_bytes(data)
    before = segments(clean)
    with held(clean) as store, pytest.raises(StoreError, match="would be overwritten"):
        restore(store)
    assert segments(clean) == before
    told = commitmq("store", "repair", str(clean.root), "--restore-cut", "--yes")
    assert told.returncode == CliExit.STORE_UNUSABLE
    assert "would be overwritten" in told.stderr


@pytest.mark.parametrize(
    ("point", "how"),
    shared(
        [
            ("restore.between_parts", "cut"),
            ("restore.before_head", "skip"),
            ("restore.write", "cut"),
            ("cut.journal", "skip"),
            ("restore.write", "skip"),
            ("cut.journal", "cut"),
            ("restore.between_parts", "skip"),
            ("restore.before_head", "cut"),
        ],
        4,
    ),
)
def test_a_restoration_that_is_killed_is_run_again(clean: GoldenStore, how: How, point: str) -> None:
    damaged(clean)
    before = segments(clean)
    mended(clean, how)
    code = (
        "import sys; from pathlib import Path; from commitmq.config import load;"
        "from commitmq.offline.held_store import HeldStore; from commitmq.offline.repair import restore;"
        f"store = HeldStore(Path(sys.argv[1]), load(None, {SETTINGS!r})); store.__enter__(); restore(store)"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "COMMITMQ_FAILPOINTS": f"{point}=kill"}
    ended = subprocess.run([sys.executable, "-c", code, str(clean.root)], env=environment, timeout=120, check=False)
    assert ended.returncode == -9
    with held(clean) as store:
        assert restore(store).cut is not None
    assert segments(clean) == before


def test_the_verb_says_what_it_did(clean: GoldenStore, tmp_path: Path) -> None:
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    nothing = commitmq("store", "repair", str(clean.root), "--restore-cut", *sets)
    assert (nothing.returncode, nothing.stdout) == (0, "nothing was cut from this log, or everything is back\n")
    damaged(clean)
    mended(clean, "cut")
    told = commitmq("store", "verify", str(clean.root), *sets)
    assert told.returncode == 0, told.stdout
    assert "repair --cut cut" in told.stdout
    done = commitmq("store", "repair", str(clean.root), "--restore-cut", "--yes", *sets)
    assert done.returncode == CliExit.DAMAGE_FOUND, done.stderr
    assert done.stdout.startswith("put back ")
