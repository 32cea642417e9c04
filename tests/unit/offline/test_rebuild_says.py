"""Goal: a rebuild that exits 0 has made a sound store; whatever it could not mend is told, with the exit code of damage.

Method: logs of which no rebuild can make a sound store, and one with damage that a start would refuse.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq.config import load
from commitmq.errors import CorruptRecordError
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import rebuild
from commitmq.offline.rebuild_parallel import checked, rebuild_parallel
from commitmq.offline.verify import verify
from commitmq.supervision.exit_codes import CliExit
from golden_stores import GoldenStore
from nodes import commitmq
from queue_store import QueueStore

SETTINGS = ("index.hash_slots=200", "index.max_items=500")


def test_a_queue_whose_offsets_begin_anew_in_the_log_is_told(tmp_path: Path) -> None:
    """Two records of one queue with the same queue offset, as a lost ConsumeQueue once made them."""
    store = QueueStore(tmp_path / "store", file_bytes=2_000)
    store.topic("orders", 1)
    for number in range(20):
        store.put("orders", 0, b"%d" % number, timestamp=1_000 + number, dispatch=False)
    store.records[("orders", 0)].clear()
    for number in range(5):
        store.put("orders", 0, b"again %d" % number, timestamp=2_000 + number, dispatch=False)
    done = commitmq("store", "rebuild", str(store.root), "--only", "queues")
    assert done.returncode == CliExit.DAMAGE_FOUND, done.stdout + done.stderr
    assert "do not show the whole log" in done.stdout
    assert "queue offset 0 comes where 20 must" in done.stdout
    found = commitmq("store", "rebuild", str(store.root), "--only", "queues", "--json")
    assert found.returncode == CliExit.DAMAGE_FOUND
    assert json.loads(found.stdout)["sound"] is False
    # The way with many tasks says the same.
    with HeldStore(store.root, load(None, ())) as held:
        made = checked(held, rebuild_parallel(held, ("queues",)), ("queues",))
        assert made.left
        assert any("comes where" in line for line in made.left)


@pytest.mark.parametrize("work", [rebuild, rebuild_parallel])
def test_a_log_that_a_start_refuses_is_not_rebuilt(
    golden_copy: Callable[[str], GoldenStore], work: Callable[[HeldStore, tuple[str, ...]], object]
) -> None:
    """Whole records behind damage in the newest segment: a rebuild up to there would leave them out without a word."""
    clean = golden_copy("clean")
    newest = [one for one in clean.messages if one["physical_offset"] >= 2 * 131_072]
    hit = newest[len(newest) // 2]["physical_offset"]
    path = sorted(clean.layout.commit_log.iterdir())[-1]
    data = bytearray(path.read_bytes())
    data[hit % 131_072 + 4] ^= 0x55
    path.write_bytes(data)
    files = {one: one.read_bytes() for one in clean.layout.consume_queue.rglob("*") if one.is_file()}
    with HeldStore(clean.root, load(None, SETTINGS)) as store:
        with pytest.raises(CorruptRecordError, match="store repair"):
            work(store, ("queues",))
        assert not verify(store).is_sound
    assert {one: one.read_bytes() for one in files} == files
