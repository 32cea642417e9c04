"""Goal: segments are there when the log needs them, ahead of it or at once, in memory if that is wanted; a roll shows little.

Method: real nodes with small segments; what the kernel says of the allocate process; sends across rolls, timed by the bench.
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from bench.rolls import measure_rolls
from commitmq import Admin, Producer, Reader
from nodes import eventually, start_node

SEGMENT_BYTES = 128 << 10


def segments(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "commitlog").iterdir())


def locked_bytes(pid: int) -> int:
    """What the process has locked into memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmLck:")) << 10


def test_without_preallocation_a_segment_is_made_when_a_message_needs_it(tmp_path: Path) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    settings = (
        f"commit_log.segment_bytes={SEGMENT_BYTES}",
        "commit_log.preallocate_segments=0",
        "commit_log.mlock=true",
    )
    with start_node(tmp_path, *settings) as node:
        bodies = [b"%04d" % number + bytes(1000) for number in range(400)]
        with Producer(node.address) as producer:
            producer.send("made", bodies[0])
            assert len(segments(node.store)) == 1
            # One run over several segments, of which none is there.
            sent = producer.send_batch("made", bodies[1:], queue=0)
        assert sent.end_offset > 3 * SEGMENT_BYTES
        assert len(segments(node.store)) == 1 + sent.end_offset // SEGMENT_BYTES, "and none behind the tail"
        allocate = node.pids()["allocate"]
        if limit == resource.RLIM_INFINITY or limit >= SEGMENT_BYTES:
            # Those that were left are let go once they are flushed.
            eventually(lambda: locked_bytes(allocate) == SEGMENT_BYTES, "the tail's segment alone is locked")
        with Reader("made", node=node.address) as consumer:
            seen: list[bytes] = []

            def has_all() -> bool:
                seen.extend(bytes(body) for body in consumer.poll(0.2).bodies)
                return len(seen) == 400

            eventually(has_all, "all")
        assert sorted(seen) == bodies
        with Admin(node.address) as admin:
            assert not admin.status()["node"].get("problem")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_roll_shows_little(tmp_path: Path) -> None:
    """Preallocation is what makes a roll cheap: it is compared with none, on the same disk in the same minute."""
    result = measure_rolls(tmp_path, rolls=20)
    assert not result.cut_short
    assert list(tmp_path.iterdir()) == []
    found = {(one.side, one.ack, one.kind): one for one in result.latencies}
    for one in found.values():
        assert one.at_rolls.count == 20
        assert one.sends.count >= 20 * 100
    for kind in ("single", "batch"):
        ready, late = found["preallocated", "memory", kind], found["made when needed", "memory", kind]
        # Ten times and more on a quiet disk.
        assert ready.at_rolls.p50_us < late.at_rolls.p50_us / 2
        # The worst sends are those that anything else on the machine held up, not those that met the end of a segment.
        assert ready.ratio_p999 < 3
