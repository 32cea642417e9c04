"""Goal: once a process keeps its freed memory, a run's megabyte costs page faults the first time only.

Method: processes of their own allocate, fill and free as a batch does, and count minor faults with getrusage(2).
"""

from __future__ import annotations

import subprocess
import sys

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
