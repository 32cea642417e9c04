"""Goal: Ctrl-C while the command is imported, and while Python ends, is exit code 130 and not a word.

Method: what the installed program does (``[project.scripts]``), in a process that gets the signal as it looks for a module, or
in its very last function.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from commitmq.supervision.exit_codes import CliExit

SCRIPT = """
import os, signal, sys

class Interrupts:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts)
from {home} import {function} as main
{last}
sys.exit(main())
"""
LAST = "import atexit; atexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT), list(range(9))])"
# From the first module behind the entry point's own to those that a verb needs when it runs.
MODULES = [
    "commitmq.cli.main", "click", "click.core", "click.termui", "importlib.metadata", "commitmq.errors", "commitmq.cli.topic",
    "commitmq.cli.output", "commitmq.client.admin", "zmq", "orjson",
]  # fmt: skip


def run(module: str, *arguments: str, last: str = "", ignored: bool = False) -> subprocess.CompletedProcess[str]:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    home, _, function = project["project"]["scripts"]["commitmq"].partition(":")
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module, home=home, function=function, last=last), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None,
    )


@pytest.mark.parametrize("module", MODULES)
def test_an_interrupt_while_modules_are_imported_is_quiet(module: str) -> None:
    ended = run(module, "topic", "list", "--node", "tcp://127.0.0.1:9")
    assert (ended.returncode, ended.stdout, ended.stderr) == (CliExit.INTERRUPTED, "", "")


def test_an_interrupt_while_python_ends_is_quiet() -> None:
    ended = run("", "--version", last=LAST)
    assert (ended.returncode, ended.stderr) == (CliExit.INTERRUPTED, "")
    assert ended.stdout.startswith("commitmq ")


def test_who_ignores_the_signal_goes_on_to() -> None:
    ended = run("click", "--version", last=LAST, ignored=True)
    assert (ended.returncode, ended.stderr) == (CliExit.OK, "")


def test_the_entry_imports_nothing_that_takes_time() -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; before = set(sys.modules); import commitmq.cli.entry; print(*sorted(set(sys.modules) - before))",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert set(ended.stdout.split()) <= {"__future__", "commitmq", "commitmq.cli", "commitmq.cli.entry"}
