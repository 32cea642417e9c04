"""Goal: once a process keeps its freed memory, a run's megabyte costs page faults the first time only; it is asked first.

Method: processes of their own allocate, fill and free as a batch does, and count minor faults with getrusage(2). Producers
with and without the argument, and what they call.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from commitmq import AsyncProducer, Producer
from commitmq.client import heap

ROUNDS = 100
PAGES_A_ROUND = 2 * 1_100_000 // 4096

_CODE = f"""
import resource, sys
from commitmq.client.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory() and keep_freed_memory()
def one():
    run = b"x" * 1_100_000
    copy = bytearray(run)
for _ in range(5):
    one()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    one()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _CODE, how], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_kept_memory_is_used_again_without_page_faults() -> None:
    # The C library's defaults must show the problem, or this test shows nothing.
    assert faults("defaults") > ROUNDS * PAGES_A_ROUND / 4
    assert faults("keep") < ROUNDS * PAGES_A_ROUND / 100


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_producer_sets_the_heap_only_when_asked(monkeypatch: pytest.MonkeyPatch, is_asked: bool) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(heap, "keep_freed_memory", lambda: calls.append(True))
    with Producer(keep_freed_memory=True) if is_asked else Producer():
        assert calls == [True] * is_asked


@pytest.mark.parametrize("is_asked", [False, True])
def test_an_asyncio_producer_sets_the_heap_only_when_asked(monkeypatch: pytest.MonkeyPatch, is_asked: bool) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(heap, "keep_freed_memory", lambda: calls.append(True))

    async def make() -> None:
        async with AsyncProducer(keep_freed_memory=True) if is_asked else AsyncProducer():
            pass

    asyncio.run(make())
    assert calls == [True] * is_asked


def test_a_batch_does_not_set_the_heap() -> None:
    """Nothing of the library calls it beside a producer's ``__init__``."""
    client = Path(heap.__file__).parent
    users = [str(path.relative_to(client)) for path in client.rglob("*.py") if "heap.keep_freed" in path.read_text()]
    assert users == ["producer.py"]
