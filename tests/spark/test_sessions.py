"""Goal: a session knows what its workers need, from where the master is and from where commitmq was imported.

Method: plain calls with addresses of masters and with import paths; no Spark is started.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import commitmq
from commitmq_plugins.spark.sessions import _import_folders, _is_loopback


def test_what_is_on_this_machine_only() -> None:
    assert all(map(_is_loopback, ("spark://127.0.0.1:7077", "spark://localhost:7077", "spark://[::1]:7077")))
    assert not any(map(_is_loopback, ("spark://10.0.0.7:7077", "spark://a:1,b:2", "yarn", "k8s://https://h:1")))


def test_folders_for_workers_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "here::/there")
    folders = _import_folders()
    assert folders[-2:] == [str(tmp_path / "here"), "/there"]
    assert Path(str(commitmq.__file__)).parent.parent in map(Path, folders)
