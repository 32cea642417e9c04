"""Goal: a reader of README.md and of docs/tour.md gets what these pages print.

Method: the blocks of each page run in their order against a real node of their own. Only what differs from machine to
machine is replaced: the store's folder, the port, the process id, times.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq.store.layout import StoreLayout
from commitmq.supervision.node_files import read_node_file

PROJECT = Path(__file__).resolve().parents[2]
README = PROJECT / "README.md"
PAGE = PROJECT / "docs" / "tour.md"
DEMO_STORE = "/var/tmp/demo"


def tour_of(path: Path) -> str:
    """The section of README.md, or all of another page."""
    text = path.read_text(encoding="utf-8")
    return text.partition("\n## A tour\n")[2].partition("\n## ")[0] if path == README else text


def blocks_of(text: str) -> list[tuple[str, str]]:
    """``(language, text)`` of each code block."""
    return re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL)


def commands_of(block: str) -> list[tuple[str, str]]:
    """``(command, what it prints)`` of a console block."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "store"
    yield folder
    if StoreLayout(folder).node_file.exists():
        subprocess.run([*COMMITMQ, "stop", "--store", str(folder)], check=False, timeout=60)


COMMITMQ = [sys.executable, "-m", "commitmq.cli.main"]


def run(command: str, store: Path) -> str:
    program, *arguments = shlex.split(command)
    assert program == "commitmq", "the tour uses one command"
    arguments = [str(store) if argument == DEMO_STORE else argument for argument in arguments]
    if arguments[0] == "start":
        arguments += ["--set", "network.port=0"]  # the default port may be taken on this machine
    done = subprocess.run([*COMMITMQ, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def comparable(output: str, store: Path) -> str:
    output = output.replace(str(store), DEMO_STORE)
    output = re.sub(r"supervisor \d+", "supervisor PID", output)
    output = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", "TIME", output)
    return re.sub(r"tcp://127\.0\.0\.1:\d+", "ADDRESS", output)


@pytest.mark.parametrize(
    ("path", "languages"),
    [
        (README, ["console", "pycon", "console"]),
        (PAGE, ["console", *["pycon"] * 6, "console"]),
    ],
    ids=["README", "tour"],
)
def test_a_tour_prints_what_it_says(
    path: Path, languages: list[str], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(tour_of(path))
    assert [language for language, _ in blocks] == languages
    names: dict[str, object] = {}
    for language, text in blocks:
        if language == "pycon":
            example = doctest.DocTestParser().get_doctest(text, names, "the tour", str(path), 0)
            report: list[str] = []
            failed, attempted = doctest.DocTestRunner(verbose=False).run(example, out=report.append, clear_globs=False)
            names.update(example.globs)  # the parser made a copy
            assert attempted >= 1
            assert failed == 0, "".join(report)
            continue
        for command, expected in commands_of(text):
            assert comparable(run(command, store), store) == comparable(expected, store), command
            if command.startswith("commitmq start"):
                monkeypatch.setitem(os.environ, "COMMITMQ_NODE", read_node_file(StoreLayout(store))["admin"][0])
    assert not StoreLayout(store).node_file.exists(), "the tour ends with its node stopped"
