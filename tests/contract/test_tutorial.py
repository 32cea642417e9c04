"""Goal: who follows plugins/TUTORIAL.md gets what it prints, and it leaves nothing out that a plugin can be.

Method: its console blocks run in their order, in a fresh environment and an empty folder, pip and pytest included. Only what
differs from machine to machine is replaced.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from commitmq.kernels.codes import ROW
from commitmq.plugin import hookspecs
from commitmq.store.layout import StoreLayout
from commitmq.supervision.node_files import read_node_file
from environments import Environment

TUTORIAL = Path(__file__).resolve().parents[2] / "plugins" / "TUTORIAL.md"
DEMO_STORE = "/var/tmp/demo"
PATIENCE_S = 60.0


def commands() -> list[tuple[str, str]]:
    """``(command, what it prints)`` in order."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), flags=re.DOTALL):
        parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
        found += [(command, output) for command, _, output in (part.partition("\n") for part in parts)]
    return found


class Shell:
    """Runs the tutorial's commands in ``folder`` with ``environment`` active."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.environment = environment
        self.folder = folder
        self.store = folder / "store"
        bin_folder = environment.folder / "bin"
        command = bin_folder / "commitmq"
        command.write_text(f'#!/bin/sh\nexec "{environment.python}" -m commitmq.cli.main "$@"\n')
        command.chmod(0o755)
        self.variables = environment.variables(PATH=f"{bin_folder}:/usr/bin:/bin")

    def run(self, command: str) -> str:
        words = shlex.split(command)
        if words[:4] == ["python", "-m", "pip", "install"]:
            self.environment.install(str(self.folder / words[4]))
            return ""
        if words[:3] == ["python", "-m", "pytest"]:
            return self.environment.pytest(self.folder, *words[3:])
        line = command.replace(DEMO_STORE, str(self.store))
        if words[:2] == ["commitmq", "start"]:
            # The default port may be taken; and nobody has to wait for a dispatcher to die five times.
            line += " --set network.port=0 --set supervisor.restart_backoff_max_ms=200"
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            env=self.variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if words[:2] == ["commitmq", "start"]:
            self.variables["COMMITMQ_NODE"] = read_node_file(StoreLayout(self.store))["admin"][0]
        return done.stdout


def comparable(output: str, store: Path) -> list[list[str]]:
    """Words by line; what a machine decides is replaced."""
    output = output.replace(str(store), DEMO_STORE)
    output = re.sub(r"supervisor \d+", "supervisor PID", output)
    output = re.sub(r"tcp://127\.0\.0\.1:\d+", "ADDRESS", output)
    output = re.sub(r"in [\d.]+ ?s\b( \(\d+:.*\))?", "in SECONDS", output)
    return [line.split() for line in output.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tutorial_prints_what_it_says(tmp_path: Path) -> None:
    shell = Shell(Environment(tmp_path / "venv"), tmp_path)
    try:
        for command, expected in commands():
            if command.startswith("sleep"):
                continue  # a reader waits; the next command is repeated until it prints what it should
            deadline = time.monotonic() + PATIENCE_S
            wanted = comparable(expected, shell.store)
            printed = comparable(shell.run(command), shell.store)
            # What asks may be repeated: a dispatcher is a moment behind.
            asks = command.startswith(("commitmq dispatcher list", "commitmq dispatcher query", "commitmq topic-sizes"))
            while asks and printed != wanted and time.monotonic() < deadline:
                time.sleep(0.1)
                printed = comparable(shell.run(command), shell.store)
            assert printed == wanted, command
        assert not StoreLayout(shell.store).node_file.exists(), "the tutorial ends with its node stopped"
    finally:
        if StoreLayout(shell.store).node_file.exists():
            shell.run(f"commitmq stop --store {DEMO_STORE}")


# ---------------------------------------------------------------- nothing is left out


HOOKS = [name for name in vars(hookspecs) if name.startswith("commitmq_")]


def test_there_are_hooks() -> None:
    assert {"commitmq_dispatchers", "commitmq_config"} <= set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented(hook: str) -> None:
    """Its docstring says when it fires, in which process, whether it can fire twice, and what raising does."""
    text = getattr(hookspecs, hook).__doc__ or ""
    assert re.search(r"^\s*Fires in (the|a|every) .*process", text, flags=re.MULTILINE), "when and where does it fire?"
    assert re.search(r"\b(once|twice|at most once|again)\b", text), "can it fire twice?"
    assert re.search(r"\bRaising\b|\braises\b", text), "what does raising do?"
    tutorial = TUTORIAL.read_text(encoding="utf-8")
    assert f"| `{hook}(" in tutorial, "the tutorial does not have it in its table"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_used_by_a_test(hook: str) -> None:
    """Somewhere in the tests, or in a project that tests install, it is implemented."""
    folder = Path(__file__).resolve().parents[1]
    implementations = [
        path
        for path in folder.rglob("*.py")
        if re.search(rf"^\s*def {hook}\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert implementations, f"no test implements {hook}"


def test_every_column_is_explained() -> None:
    table = TUTORIAL.read_text(encoding="utf-8").partition("| Columns |")[2].partition("\n\n")[0]
    first_cells = [line.partition("|")[2].partition("|")[0] for line in table.splitlines()]
    columns = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert sorted(columns) == sorted(ROW.names or ())
