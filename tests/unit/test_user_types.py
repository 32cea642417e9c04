"""Goal: a user's program that is wrong about this package is told by its type checker, and one that is right is not.

Method: pyright's strict mode (basedpyright: the same checker, with all it needs in its package) reads a program that uses most
of the public names, and the same program with mistakes at its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "user_program.py"
MISTAKES = """

async def wrong() -> None:
    async with AsyncProducer() as producer:
        await producer.send("t", b"x", tag="a")
        await producer.send("t", b"x", queue="a")
    AsyncProducer(max_pendin=3)
    Consumer("t", group=1)
    commitmq.connect().reader("t", group="g")
    Producer(delivery=True)
    Consumer()
    Consumer("t")
    commitmq.AsyncConsumer("t", auto_commit=False)
    consumer = Consumer("t", group="g")
    consumer.run(handle, worker=3)
    consumer.run(handle_async)
"""
RULES = [
    *["reportCallIssue", "reportArgumentType"] * 3,
    *["reportCallIssue"] * 3,
    "reportCallIssue",
    "reportArgumentType",
]


def problems(folder: Path, program: str) -> list[tuple[int, str]]:
    """``(line, rule)`` of each problem, lines from 1."""
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "pythonVersion": "3.11"}))
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(folder), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1, done.stderr
    return [(one["range"]["start"]["line"] + 1, one["rule"]) for one in found["generalDiagnostics"]]


def test_a_program_is_clean_and_its_mistakes_are_seen(tmp_path: Path) -> None:
    program = PROGRAM.read_text()
    first = program.count("\n") + 1
    found = problems(tmp_path, program + MISTAKES)
    assert [line for line, _ in found if line < first] == []
    assert [rule for _, rule in found] == RULES, found
