"""Goal: a damaged log that was cut where the damage begins opens in RocketMQ, which reads every message that is left.

Method: RocketMQ's own clean store with one record damaged in its middle, repaired, and read by its classes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interop_checks import in_log_order, without_crc

from commitmq.config import load
from commitmq.offline.held_store import HeldStore
from commitmq.offline.repair import How, repair
from golden_stores import GOLDEN_SEGMENT_BYTES, GoldenStore

pytestmark = [pytest.mark.interop, pytest.mark.timeout(420)]

WAYS: tuple[How, ...] = ("cut",)


def test_rocketmq_reads_what_a_repair_left(
    tmp_path: Path,
    golden_copy: Callable[[str], GoldenStore],
    run_rocketmq_on_each: Callable[..., dict[Path, Any]],
) -> None:
    store = golden_copy("clean")
    hit = [one for one in store.messages if one["topic"] == "GoldenNormal" and one["physical_offset"] < 120_000][60]
    offset = hit["physical_offset"]
    path = store.layout.commit_log / f"{offset - offset % GOLDEN_SEGMENT_BYTES:020d}"
    data = bytearray(path.read_bytes())
    data[offset + 100 : offset + 103] = b"\xff\xfe\xfd"
    path.write_bytes(data)
    roots: dict[Path, tuple[str, ...]] = {}
    for how in WAYS:
        root = tmp_path / how
        shutil.copytree(store.root, root)
        with HeldStore(root, load(None, ("index.hash_slots=200", "index.max_items=500"))) as held:
            assert repair(held, how).damage
        roots[root] = ("read",)
    runs = run_rocketmq_on_each(roots)
    everything = in_log_order(store.messages)
    for root, left in ((tmp_path / "cut", [one for one in everything if one["physical_offset"] < offset]),):
        run = runs[root]
        assert "failed" not in run.report, run.report["failed"]
        seen = [line for line in in_log_order(without_crc(run.lines)) if not line["topic"].startswith("%DLQ%")]
        assert seen == left, root.name
