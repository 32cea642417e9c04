"""Goal: the clients work where the system has no eventfd (macOS).

Method: their own tests once more, in a process from which it was taken. The nodes beside them keep theirs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nodes import environment

HERE = Path(__file__).parent
FILES = ("test_consumer.py", "test_consumer_groups.py", "test_aio.py", "test_linger.py", "test_pending_batches.py")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_clients_pass_their_tests_without_eventfd(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow and not long"),
            *("--basetemp", str(tmp_path / "its"), *(str(HERE / name) for name in FILES)),
        ],
        cwd=HERE.parents[1],
        env=environment(COMMITMQ_TEST_WITHOUT_EVENTFD="1", PYTEST_XDIST_WORKER=""),
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-10_000:]
    assert "without eventfd" in ended.stdout
