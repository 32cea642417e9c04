"""Goal: a name that is not UTF-8 crashes nothing: a store's path is refused before the start, another path is shown escaped.

Method: the real commands with paths of raw bytes, and in a locale without UTF-8 (Python takes UTF-8 for the plain C locale, so
that is switched off).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commitmq.config import load
from commitmq.errors import ConfigError
from commitmq.format.file_names import segment_name
from commitmq.protocol import wire
from commitmq.store.layout import StoreLayout
from commitmq.supervision.exit_codes import CliExit
from nodes import Node

RAW = os.fsdecode(b"caf\xe9")
ACCENT = "café"
PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command with these words."""
    return subprocess.run(
        [sys.executable, "-m", "commitmq.cli.main", *map(os.fsencode, words)],
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "environment", "advice"),
    [(RAW, {}, "give the folder another name"), (ACCENT, PLAIN_C, "LC_ALL=C.UTF-8")],
    ids=["name", "locale"],
)
def test_such_a_store_is_refused_before_the_start(
    tmp_path: Path, name: str, environment: dict[str, str], advice: str
) -> None:
    store = tmp_path / name / "store"
    StoreLayout(store).own.mkdir(parents=True)  # as after a former life
    before = sorted(tmp_path.rglob("*"))
    started = run("start", "--store", store, "--set", "network.port=0", "--background", **environment)
    assert started.returncode == CliExit.STORE_UNUSABLE, started.stderr
    assert "needs a path in UTF-8" in started.stderr
    assert advice in started.stderr
    assert sorted(tmp_path.rglob("*")) == before
    for verb in ("status", "doctor"):
        found = run(verb, "--store", store, **environment)
        assert found.returncode == CliExit.NODE_UNAVAILABLE
        assert "no node runs on the store" in found.stderr


def test_a_store_of_such_a_name_is_verified(tmp_path: Path) -> None:
    """Without a node any path will do."""
    log = tmp_path / RAW / "store" / "commitlog" / segment_name(0)
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x" * 1_000)
    found = run("store", "verify", "--json", log.parent.parent, **PLAIN_C)
    assert found.returncode == CliExit.DAMAGE_FOUND, found.stderr
    assert json.loads(found.stdout)["findings"]


@pytest.mark.slow
def test_other_paths_may_have_any_name(tmp_path: Path) -> None:
    """The store's path has letters beyond ASCII and is too long for sockets; those of the temporary folder and the
    configuration file have raw bytes.
    """
    odd = tmp_path / RAW
    odd.mkdir()
    (odd / "node.toml").write_text("[log]\nlevel = 'DEBUG'\n", encoding="utf-8")
    node = Node(tmp_path / ACCENT / ("x" * 60) / "store")
    environment = {**node.environment(), "TMPDIR": str(odd)}
    words = [*node.arguments(), "--config", str(odd / "node.toml"), "--background"]
    started = run(*words, **environment)
    try:
        assert started.returncode == 0, started.stderr
        for verb in (("status",), ("doctor",), ("config", "show")):
            found = run(*verb, "--store", node.store, "--json", **environment)
            assert found.returncode == 0, found.stderr
            assert json.loads(found.stdout)
        assert rf"file {tmp_path}/caf\udce9/node.toml" in json.dumps(found.stdout).replace(r"\\\\", "\\")
        assert run("stop", "--store", node.store, **environment).returncode == 0
    finally:
        node.kill_all(known=True)
    assert run("store", "verify", node.store, **environment).returncode == 0


def test_a_setting_that_is_no_text_is_refused(tmp_path: Path) -> None:
    started = run("start", "--store", tmp_path / "store", "--set", f"metrics.token_file=/{RAW}", "--background")
    assert started.returncode == CliExit.CONFIG_ERROR, started.stderr
    assert r"--set: metrics.token_file='/caf\udce9' is not UTF-8" in started.stderr
    with pytest.raises(ConfigError, match="COMMITMQ__METRICS__TOKEN_FILE"):
        load(environment={"COMMITMQ__METRICS__TOKEN_FILE": RAW})


def test_an_answer_shows_such_a_text_escaped() -> None:
    for answer in (wire.ok(7, store=RAW, rows=[{RAW: (RAW, 1)}]), wire.error(7, "SYSTEM_ERROR", RAW)):
        assert rb"caf\\udce9" in answer
        assert wire.parse_answer(answer)["id"] == 7
    with pytest.raises(TypeError):
        wire.ok(7, store=object())
