"""Goal: the scripts prepare the environment only when they must, never spoil a folder that is not theirs, and say what
is missing.

Method: the environment script runs as users run it, with folders and commands laid out for each case. Nothing here
installs anything: the cases end before that, or look at what would be run.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FIND_PYTHON = f'. {shlex.quote(str(SCRIPTS / "_python.sh"))}; echo "$python"'


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"project_script_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def env() -> ModuleType:
    return load("_env")


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command_line = ["/bin/sh", "-c", command]
    variables = {**os.environ, **environment}
    return subprocess.run(command_line, capture_output=True, text=True, env=variables, timeout=60, check=False)


# ---------------------------------------------------------------- finding a Python


def fake_command(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def test_a_machine_without_python_is_told_what_is_missing(tmp_path: Path) -> None:
    done = shell(FIND_PYTHON, PATH=str(tmp_path), COMMITMQ_PYTHON="")
    assert done.returncode == 69
    assert "Python 3.11 or newer" in done.stderr


def test_a_python_that_does_not_run_or_is_too_old_is_passed_over(tmp_path: Path) -> None:
    fake_command(tmp_path, "python3.13", "echo 'no such version is installed' >&2; exit 127")
    fake_command(tmp_path, "python3.12", "exit 1")  # what the check of version and modules ends with
    (tmp_path / "python3").symlink_to(sys.executable)
    done = shell(FIND_PYTHON, PATH=str(tmp_path), COMMITMQ_PYTHON="")
    assert done.stdout == "python3\n"
    assert done.stderr == ""


def test_the_newest_version_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    for name in ("python3.11", "python3.12", "python3"):
        fake_command(tmp_path, name, "exit 0")
    assert shell(FIND_PYTHON, PATH=str(tmp_path), COMMITMQ_PYTHON="").stdout == "python3.12\n"
    assert shell(FIND_PYTHON, PATH=str(tmp_path), COMMITMQ_PYTHON="python3.11").stdout == "python3.11\n"


# ---------------------------------------------------------------- the environment


def test_a_folder_that_is_no_environment_stays_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="ascii")
    command = [sys.executable, "-I", str(SCRIPTS / "_env.py"), "-c", "print('ran')"]
    variables = {**os.environ, "COMMITMQ_VENV": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60, check=False)
    assert done.returncode == 69
    assert "no virtual environment" in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_environment_that_is_up_to_date_is_used_as_it_is(
    env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "works", lambda folder: True)
    monkeypatch.setattr(env, "run", lambda command, problem: pytest.fail(f"ran {command}"))
    (tmp_path / "commitmq-environment").write_text(env.environment_digest(), encoding="ascii")
    env.ensure_environment(tmp_path)


def test_changed_pins_install_again_and_an_interrupted_installation_counts_as_none(
    env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = tmp_path / "commitmq-environment"
    stamp.write_text("of other pins", encoding="ascii")
    commands: list[list[str]] = []

    def interrupted(command: list[str], problem: str) -> None:
        commands.append(command)
        raise env.EnvironmentUnavailable(problem)

    monkeypatch.setattr(env, "works", lambda folder: True)
    monkeypatch.setattr(env, "run", interrupted)
    with pytest.raises(env.EnvironmentUnavailable, match="index"):
        env.ensure_environment(tmp_path)
    assert "install" in commands[0]
    assert not stamp.exists()

    monkeypatch.setattr(env, "run", lambda command, problem: commands.append(command))
    env.ensure_environment(tmp_path)
    assert stamp.read_text(encoding="ascii") == env.environment_digest()
    assert all("--constraint" in command for command in commands)


def test_an_extra_is_installed_when_it_is_asked_for_and_not_again(
    env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(env, "run", lambda command, problem: commands.append(command))
    env.ensure_extra(tmp_path, "bench")
    assert len(commands) == 1
    assert commands[0][-1] == f"{SCRIPTS.parent}[bench]"
    assert "--constraint" in commands[0]
    env.ensure_extra(tmp_path, "bench")
    assert len(commands) == 1
    (tmp_path / "commitmq-extra-bench").write_text("of other pins", encoding="ascii")
    env.ensure_extra(tmp_path, "bench")
    assert len(commands) == 2


def test_the_stamp_follows_requirements_pins_and_place(
    env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(SCRIPTS.parent / name, folder)
        monkeypatch.setattr(env, "PROJECT", folder)
        digests.add(env.environment_digest())
    for name in ("pyproject.toml", "constraints.txt"):
        with open(tmp_path / "b" / name, "a", encoding="utf-8") as file:
            file.write("# changed\n")
        digests.add(env.environment_digest())
    assert len(digests) == 4


def test_what_runs_in_the_environment_keeps_its_compiled_code(env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name in ("ensure_environment", "ensure_kernels"):
        monkeypatch.setattr(env, name, lambda _: None)
    monkeypatch.setattr(os, "execv", lambda *command: ran.append((command, dict(os.environ))))
    for name in env.FOREIGN_SETTINGS:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # container images set it
    for name in ("VIRTUAL_ENV", "PATH"):
        monkeypatch.setenv(name, os.environ[name])  # the script changes them
    env.main(["script", "argument"])
    ((_, environment),) = ran
    assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_a_copied_environment_is_not_taken_for_a_working_one(env: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    version = f"{sys.version_info[0]} {sys.version_info[1]}"
    fake_command(tmp_path / "bin", "python", f"echo /somewhere/else {version}")
    assert not env.works(tmp_path)
    fake_command(tmp_path / "bin", "python", f"echo {shlex.quote(f'{tmp_path} {version}')}")
    assert env.works(tmp_path)
    assert not env.works(tmp_path / "absent")


def test_two_scripts_at_once_prepare_one_after_the_other(env: ModuleType) -> None:
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import _env\nwith _env.only_one_at_a_time(): print('in')"
    pipe = subprocess.PIPE
    with env.only_one_at_a_time():
        other = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True)
        assert other.stderr is not None
        assert "waiting" in other.stderr.readline()
        assert other.poll() is None
    out, _ = other.communicate(timeout=60)
    assert out == "in\n"


# ---------------------------------------------------------------- the checks


@pytest.mark.parametrize(
    ("arguments", "tools"),
    [
        (["lint"], ["ruff check", "ruff format", "mypy"]),
        (["test"], ["collect", "ruff check", "ruff format", "mypy", "wait", "pytest -m not slow and not long -n 4"]),
        (["test", "tests/unit"], ["ruff check", "ruff format", "mypy", "pytest -m not slow and not long tests/unit"]),
        (["test", "--no-lint"], ["pytest -m not slow and not long -n 4"]),
        (["test", "--no-lint", "-m", "slow"], ["pytest -m slow"]),
        (
            ["test", "--no-lint", "tests/unit", "--maxfail=1"],
            ["pytest -m not slow and not long tests/unit --maxfail=1"],
        ),
    ],
)
def test_what_each_script_runs(arguments: list[str], tools: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = load("checks")
    ran: list[str] = []

    def check(*command: str) -> int:
        ran.append(" ".join(command))
        return 0

    def collect() -> SimpleNamespace:
        ran.append("collect")
        return SimpleNamespace(wait=lambda: ran.append("wait"))

    monkeypatch.setattr(checks, "check", check)
    monkeypatch.setattr(checks, "collect", collect)
    monkeypatch.chdir(SCRIPTS)
    assert checks.main(arguments) == 0
    assert Path.cwd() == SCRIPTS.parent
    assert len(ran) == len(tools)
    assert all(got == tool or got.startswith(f"{tool} --") for got, tool in zip(ran, tools, strict=True))


def test_a_failed_check_ends_the_run_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = load("checks")
    ends: list[str] = []
    collecting = SimpleNamespace(kill=lambda: ends.append("kill"), wait=lambda: ends.append("wait"))
    monkeypatch.setattr(checks, "check", lambda tool, *_: 3 if tool == "mypy" else 0)
    monkeypatch.setattr(checks, "collect", lambda: collecting)
    monkeypatch.chdir(SCRIPTS.parent)
    assert checks.main(["test"]) == 3
    assert ends == ["kill", "wait"]
    assert checks.main(["lint"]) == 3
    assert checks.main(["test", "--no-lint"]) == 0


# ---------------------------------------------------------------- continuous integration

SUITE = """
import pytest

@pytest.mark.parametrize("value", ["a", 'b"c'])
def test_usual(value):
    assert FAILS != "usual", "the usual reason"

@pytest.mark.slow
def test_slow():
    open("slow", "w").close()

@pytest.mark.slow
@pytest.mark.alone
def test_alone():
    assert FAILS != "alone", "a reason of its own"
"""


def continuous(folder: Path, fails: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/run in a project of a few tests, of which those of one kind fail."""
    for name in (".ci", "scripts"):
        (folder / name).mkdir()
    shutil.copy(SCRIPTS.parent / ".ci" / "run", folder / ".ci")
    shutil.copy(SCRIPTS.parent / "tests" / "conftest.py", folder)
    fake_command(folder / "scripts", "quickstart", "exit 0")
    pytest_command = f"{shlex.quote(sys.executable)} -m pytest -q -p xdist.plugin"
    fake_command(
        folder / "scripts",
        "test",
        f'[ "${{1-}}" != --no-lint ] || shift; [ $# != 0 ] || set -- -m "not slow"; exec {pytest_command} "$@" -n 0',
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    alone\n", encoding="ascii")
    (folder / "test_suite.py").write_text(SUITE.replace("FAILS", repr(fails)), encoding="ascii")
    return shell(
        shlex.quote(str(folder / ".ci" / "run")),
        PYTEST_ADDOPTS="",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        PYTEST_XDIST_WORKER="",  # of the process that runs this test
        PYTHONPATH=str(SCRIPTS.parent / "tests" / "support"),
    )


@pytest.mark.parametrize(
    ("fails", "names", "reason"),
    [
        ("usual", ["test_usual[a]", 'test_usual[b"c]'], "the usual reason"),
        ("alone", ["test_alone"], "a reason of its own"),
    ],
)
def test_one_failed_test_fails_the_run_whose_last_lines_are_its_name_and_reason(
    tmp_path: Path, fails: str, names: list[str], reason: str
) -> None:
    done = continuous(tmp_path, fails)
    assert done.returncode == 1, done.stdout + done.stderr
    _, heading, listed = done.stdout.rpartition("── tests that failed, and why:\n")
    assert heading
    named = [line for line in listed.splitlines() if line.startswith("test_suite.py")]
    assert named == [f"test_suite.py::{name} (call)" for name in names]
    assert listed.count(f"AssertionError: {reason}") == len(names)
    assert (tmp_path / "slow").exists() == (fails == "alone"), "the parts behind a failed one do not run"


def test_a_run_without_failures_has_no_such_list(tmp_path: Path) -> None:
    done = continuous(tmp_path, "none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
