"""Goal: ``commitmq store dump`` prints exactly what the golden messages.jsonl say, in log order, and touches nothing.

Method: the real command in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from commitmq.format.file_names import segment_name
from commitmq.supervision.exit_codes import CliExit
from golden_stores import GoldenStore
from log_builder import SEGMENT_BYTES, build_log, message

RUN = [sys.executable, "-m", "commitmq.cli.main", "store", "dump"]


def dump(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, str(folder)], capture_output=True, text=True, check=False, timeout=60)


def test_golden_stores(golden: GoldenStore) -> None:
    before = snapshot(golden.root)
    done = dump(golden.root)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    offsets = [json.loads(line)["physical_offset"] for line in lines]
    assert offsets == sorted(offsets)
    beyond = [line for line in lines if line not in set(golden.lines)]
    assert [json.loads(line)["topic"].startswith("%DLQ%") for line in beyond] == [True]
    assert sorted(set(lines) - set(beyond)) == sorted(golden.lines)
    assert snapshot(golden.root) == before


def test_torn_tail_of_a_golden_store(golden_copy: Callable[[str], GoldenStore]) -> None:
    store = golden_copy("crash")
    path = store.layout.commit_log / segment_name(262_144)
    data = bytearray(path.read_bytes())
    data[286_344 - 262_144 + 100] ^= 1  # within the last record's body
    path.write_bytes(data)
    done = dump(store.root)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 411
    assert "torn" in done.stderr
    assert f"{path} at offset {286_344 - 262_144}" in done.stderr


def test_damage_before_the_end_is_not_a_torn_tail(golden_copy: Callable[[str], GoldenStore]) -> None:
    store = golden_copy("clean")
    path = store.layout.commit_log / segment_name(0)
    data = bytearray(path.read_bytes())
    data[1758 + 8] ^= 1
    path.write_bytes(data)
    done = dump(store.root)
    assert done.returncode == CliExit.STORE_UNUSABLE
    assert 0 < len(done.stdout.splitlines()) < 10
    assert "damage" in done.stderr
    assert f"{path} at offset 1758" in done.stderr


def test_segments_of_different_sizes(tmp_path: Path) -> None:
    build_log(tmp_path / "commitlog", (message(number) for number in range(15)))
    (tmp_path / "commitlog" / segment_name(SEGMENT_BYTES)).write_bytes(bytes(77))
    done = dump(tmp_path)
    assert done.returncode == CliExit.STORE_UNUSABLE
    assert "77 bytes" in done.stderr
    assert "the others 4096" in done.stderr


def test_no_store_and_an_empty_one(tmp_path: Path) -> None:
    done = dump(tmp_path)
    assert done.returncode == CliExit.STORE_UNUSABLE
    assert "no folder commitlog" in done.stderr
    (tmp_path / "commitlog").mkdir()
    done = dump(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (tmp_path / "commitlog" / segment_name(0)).write_bytes(b"")
    assert dump(tmp_path).stdout == ""
    assert dump(tmp_path / "absent").returncode == CliExit.USAGE


def test_a_reader_that_goes_away(golden: GoldenStore) -> None:
    """``dump … | head``: no traceback."""
    with subprocess.Popen(
        [*RUN, str(golden.root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}
