"""Goal: a program with a session writes what the program writes, and its errors begin with our sentence.

Method: programs of their own that read a golden store; all that they write is compared, to the last byte where they succeed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commitmq_plugins.spark import quiet
from commitmq_plugins.spark.sessions import Java, quiet_home
from golden_stores import GoldenStore

_BEGIN = """
import os, signal, sys, threading
from commitmq_plugins.spark import session
from commitmq_plugins.spark.sessions import QUICK_START
spark = session("local[2]", **QUICK_START)
def read(**options):
    return spark.read.format("commitmq").options(**{"store": sys.argv[1], "topics": "GoldenNormal", **options}).load()
"""


def run(tmp_path: Path, store: GoldenStore, program: str) -> tuple[int, str, str]:
    """``(exit code, standard output, standard error)`` of a program with a session, in a process group of its own."""
    script = tmp_path / "program.py"
    script.write_text(_BEGIN + program, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != quiet.LOG_VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(one for one in sys.path if one)
    ended = subprocess.run(
        [sys.executable, script, store.root], capture_output=True, text=True, env=environment, timeout=300,
        start_new_session=True, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_only_the_program_s_line_and_the_errors_begin_with_our_sentence(
    tmp_path: Path, golden_stores: dict[str, GoldenStore]
) -> None:
    program = """
from commitmq.errors import ConfigError
def told(work):
    try:
        work()
    except Exception as error:
        assert isinstance(error.commitmq_error, ConfigError), repr(error)
        return str(error)
    raise AssertionError("no error")
sentence = told(lambda: read(topics="GoldenNormol").count())
assert sentence.startswith(f"there is no topic 'GoldenNormol' in {sys.argv[1]}; similar topics are: GoldenNormal"), sentence
assert sentence.endswith(". With missingTopics=ignore it counts as empty"), sentence
assert told(lambda: read(topicz="x")).startswith("there is no option 'topicz'; ")
wrong = spark.read.format("commitmq").schema("wrong int")
assert told(lambda: wrong.load(sys.argv[1]).count()).startswith("there is no column 'wrong'; ")
assert read(topics="GoldenNormal,nobody", missingTopics="ignore").count() == 240
print(read().count())
spark.stop()
spark.stop()
"""
    code, out, err = run(tmp_path, golden_stores["clean"], program)
    assert (code, out, err) == (0, "240\n", ""), err


@pytest.mark.slow
def test_an_error_of_the_program_is_all_there_is(tmp_path: Path, golden_stores: dict[str, GoldenStore]) -> None:
    code, out, err = run(tmp_path, golden_stores["clean"], "print(read().count())\nraise KeyError('mine')\n")
    assert (code, out) == (1, "240\n")
    lines = err.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "KeyError: 'mine'")
    assert "pyspark" not in err


@pytest.mark.slow
def test_ctrl_c_is_a_keyboard_interrupt(tmp_path: Path, golden_stores: dict[str, GoldenStore]) -> None:
    program = f"""
import pathlib, time
from py4j.clientserver import ClientServerConnection
print(read().count(), flush=True)
begun = pathlib.Path({str(tmp_path / "begun")!r})
def authenticate(connection, original=ClientServerConnection._authenticate_connection):
    time.sleep(1)  # meanwhile the JVM does what py4j asks for on KeyboardInterrupt
    original(connection)
def interrupt():
    while not begun.exists():
        time.sleep(0.1)
    time.sleep(1)  # the driver waits for its tasks
    ClientServerConnection._authenticate_connection = authenticate
    spark.sparkContext._gateway._gateway_client.deque.clear()  # py4j then asks over the interrupted connection only
    os.killpg(0, signal.SIGINT)
def work(rows):
    begun.touch()
    return [time.sleep(600)]
job = spark.range(2).rdd.mapPartitions(work)
threading.Thread(target=interrupt).start()
job.collect()
"""
    code, out, err = run(tmp_path, golden_stores["clean"], program)
    assert (code, out) == (-2 if code < 0 else 130, "240\n"), err
    assert err.count("Traceback") == 1, err
    assert err.endswith("\nKeyboardInterrupt\n")


@pytest.mark.slow
def test_an_error_within_tasks_is_the_sentence(tmp_path: Path, golden_stores: dict[str, GoldenStore]) -> None:
    program = """
import shutil
from pathlib import Path
damaged = Path(__file__).with_name("damaged")
shutil.copytree(sys.argv[1], damaged)
file = sorted((damaged / "commitlog").iterdir())[0]
data = bytearray(file.read_bytes())
data[40_000:60_000] = bytes(20_000)
file.write_bytes(data)
read(store=str(damaged)).count()
"""
    code, out, err = run(tmp_path, golden_stores["clean"], program)
    assert (code, out) == (1, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.count("Traceback") == 1, err
    last = err.splitlines()[-1]
    assert last.startswith("pyspark.errors.exceptions.captured.PythonException: messages are missing: GoldenNormal/")


@pytest.mark.long
def test_a_task_of_the_program_keeps_its_traceback(tmp_path: Path, golden_stores: dict[str, GoldenStore]) -> None:
    program = """
from commitmq.errors import ConfigError
def mine(rows):
    raise ConfigError("within a task of mine")
read().rdd.mapPartitions(mine).collect()
"""
    code, _, err = run(tmp_path, golden_stores["clean"], program)
    assert code == 1
    assert "in mine" in err
    assert err.splitlines()[-1] == "commitmq.errors.ConfigError: within a task of mine"


def test_a_log_configuration_of_the_user_s_counts(tmp_path: Path) -> None:
    (tmp_path / "log4j2.xml").write_text("")
    assert quiet.log_environment({"SPARK_CONF_DIR": str(tmp_path)}) == {}
    assert quiet.log_environment({quiet.LOG_VARIABLE: "mine.xml"}) == {}
    ((name, place),) = quiet.log_environment({"SPARK_CONF_DIR": str(tmp_path / "empty")}).items()
    assert name == quiet.LOG_VARIABLE
    assert Path(place.removeprefix("file://")).is_file()


def test_the_incubator_module_is_there_for_those_who_name_it(tmp_path: Path) -> None:
    program = tmp_path / "java" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nfor one do echo "<$one>"; done\n')
    program.chmod(0o755)
    home = quiet_home(Java(tmp_path / "java", 17, "PATH"), {"XDG_CACHE_HOME": str(tmp_path)})
    flag = "--add-modules=jdk.incubator.vector"

    def given(*words: str) -> list[str]:
        ended = subprocess.run([home / "bin" / "java", *words], capture_output=True, text=True, check=True)
        return ended.stdout.split("\n")

    assert given(flag, "-Da=b c", "", "Main") == ["<-Da=b c>", "<>", "<Main>", ""]
    assert given(flag, flag, "Main") == [f"<{flag}>", "<Main>", ""]
