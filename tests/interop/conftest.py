"""Fixtures of the interop tests: RocketMQ's classes, built once, and copies of the golden stores."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rocketmq

RunRocketMQ = Callable[..., rocketmq.Run]


@pytest.fixture(scope="session")
def _class_path() -> str:
    missing = rocketmq.missing_tools()
    if missing:
        reason = f"RocketMQ's classes cannot run: PATH has no {', '.join(missing)}"
        if os.environ.get("COMMITMQ_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return rocketmq.build()


@pytest.fixture
def run_rocketmq(_class_path: str) -> RunRocketMQ:
    """``run_rocketmq(root, verb, …)``: see :func:`rocketmq.run`."""

    def run(root: Path, *arguments: str, **options: Any) -> rocketmq.Run:
        return rocketmq.run(_class_path, root, *arguments, **options)

    return run


@pytest.fixture
def golden(tmp_path: Path) -> Callable[[str], tuple[Path, list[dict[str, Any]]]]:
    """``golden("clean"|"crash")``: a copy of that store's root, and the lines of its messages.jsonl."""

    def unpack(kind: str) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path / f"golden-{kind}"
        with tarfile.open(_golden_folder() / f"rocketmq-5.4.0-{kind}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        lines = next(folder.rglob("messages.jsonl"))
        return lines.with_name("store"), [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]

    return unpack


def _golden_folder() -> Path:
    """Where the golden stores' archives are: the folder COMMITMQ_GOLDEN names, in tests/, or beside the project."""
    tests = Path(__file__).resolve().parents[1]
    named = os.environ.get("COMMITMQ_GOLDEN")
    candidates = [tests / "golden", tests / "data", tests.parents[1] / "shared" / "golden"]
    for folder in [Path(named)] if named else candidates:
        if any(folder.glob("rocketmq-*.tar.gz")):
            return folder
    raise FileNotFoundError("the golden stores are not there; set COMMITMQ_GOLDEN to the folder of their archives")


def store_digests(root: Path) -> dict[str, str]:
    """SHA-256 of every CommitLog and ConsumeQueue file, by path under ``root``."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("commitlog", "consumequeue")
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
    }
