"""Goal: kernels do not grow by instructions that nobody wanted.

Method: single steps of the real compiled code on runs of 1 KiB bodies. What one message more takes is judged; in that, the
work of a call cancels.

The limits are 15 % above what was measured on x86-64. What ISA-L's CRC-32 takes is measured in the same run and left out: 81
instructions for 1 KiB with VPCLMULQDQ, 438 without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kernel_steps
import ptrace
import pytest

from nodes import environment

HERE = Path(__file__).parent
BODY_BYTES = 1024
RECORD_BYTES = 1200
# Instructions a message, measured and limit; and the bytes of which a CRC-32 is computed, which are not counted. check_run:
# 100 bytes of properties by words of eight (well-formed, allowed names, UTF-8), the fields. store_run: copies 1.2 KB by the C
# library, fills in the fields; two processors gave 211 and 359. walk: properties again, for keys and tags.
LIMITS = {"check_run": (861, 990, BODY_BYTES), "store_run": (359, 415, RECORD_BYTES), "walk": (871, 1000, 0)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    if reason := ptrace.why_not():
        if os.environ.get("COMMITMQ_CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    found = tmp_path_factory.mktemp("steps") / "counts.json"
    program = [sys.executable, str(HERE / "kernel_steps.py"), str(BODY_BYTES)]
    subprocess.run(
        [sys.executable, ptrace.__file__, "steps", found, *program],
        env={**environment(), "PYTHONHASHSEED": "0"},
        check=True,
        timeout=110,
    )
    loaded: dict[str, int] = json.loads(found.read_bytes())
    return loaded


@pytest.mark.parametrize("step", LIMITS)
def test_instructions_for_a_message(counts: dict[str, int], step: str) -> None:
    measured, limit, crc_bytes = LIMITS[step]
    got = kernel_steps.per_message(counts, step) - kernel_steps.crc_of(counts, crc_bytes)
    assert measured / 2 <= got <= limit, f"{step}: {got:.0f} instructions a message, {measured} were measured"
