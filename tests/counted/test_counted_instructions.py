"""Goal: kernels do not grow by instructions that nobody wanted.

Method: single steps of the real compiled code on runs of 1 KiB bodies. What one message more takes is judged; in that, the
work of a call cancels.

The limits are 15 % above what was measured on x86-64 with AVX2. numba compiles for the processor it meets, so another one may
give other counts; loops over bytes, which are what must not come about, give the same or nearly the same.
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

from commitmq.kernels.warm import warm
from nodes import environment

HERE = Path(__file__).parent
BODY_BYTES = 1024
# Instructions a message, measured and limit. check_run: 100 bytes of properties by words of eight (well-formed, allowed names,
# UTF-8), a CRC-32 of the body by ISA-L, the fields. store_run: copies 1.2 KB by the C library, fills in the fields and
# computes the CRC-32 of the record. walk: properties again, for keys and tags.
LIMITS = {"check_run": (942, 1080), "store_run": (456, 525), "walk": (706, 810)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    if reason := ptrace.why_not():
        if os.environ.get("COMMITMQ_CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    warm()
    found = tmp_path_factory.mktemp("steps") / "counts.json"
    program = [sys.executable, HERE / "kernel_steps.py", str(BODY_BYTES)]
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
    got = kernel_steps.per_message(counts, step)
    assert 100 < got <= LIMITS[step][1], f"{step}: {got:.0f} instructions a message"
