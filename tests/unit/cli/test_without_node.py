"""Goal: without the extra ``node`` the clients and the command line are whole, and what needs a node says which words are
missing.

Method: processes in which isal and rich cannot be imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from commitmq import extras
from commitmq.cli.main import cli
from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.output import can_draw
from commitmq.errors import CommitMQError, MissingExtraError
from commitmq.supervision.exit_codes import CliExit
from golden_stores import GoldenStore
from nodes import environment
from without_node import HIDDEN, hide_node, python

COMMAND = ("-m", "commitmq.cli.main")
WORDS = "needs isal, which is not installed: pip install 'commitmq[node]'\n"
# Each verb that needs the node with arguments that are right.
NODE_VERBS: dict[str, list[str]] = {
    "start": ["--store", "{new}"],
    "store verify": ["{store}"],
    "store rebuild": ["{store}"],
    "store repair": ["{store}", "--cut", "--yes"],
    "store snapshot": ["{store}", "--to", "{new}"],
    "bench consume": [],
}
ALSO: dict[str, list[str]] = {
    "plugins": ["--all"],
    "store expire": ["{store}", "--keep-bytes", "1"],
}


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return hide_node(tmp_path / "hidden")


def run(variables: dict[str, str], *code: str) -> str:
    """The output of the program ``code``, which must succeed."""
    ended = python(variables, "-c", "\n".join(code))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def verbs(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """All commands below ``group``, with the words that call them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from verbs(command, (*path, name))


def test_the_modules_are_hidden_here(variables: dict[str, str]) -> None:
    code = f"""
for name in {HIDDEN}:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error.name)
"""
    assert run(variables, code).split() == list(HIDDEN)


# ---------------------------------------------------------------- the clients


def test_every_name_and_module_of_the_clients_is_there(variables: dict[str, str]) -> None:
    code = """
import pkgutil, sys
from importlib import import_module
import commitmq, commitmq.client
for name in commitmq.__all__:
    getattr(commitmq, name)
for module in pkgutil.iter_modules(commitmq.client.__path__, "commitmq.client."):
    import_module(module.name)
print(*sorted({"numpy", "zmq"} & sys.modules.keys()), commitmq.format.record.crc32.__module__)
"""
    assert run(variables, code).split() == ["numpy", "zmq", "zlib"]


def test_a_plugin_s_author_has_what_is_light_and_is_told_what_the_rest_needs(variables: dict[str, str]) -> None:
    code = """
import commitmq.plugin
for name in commitmq.plugin.__all__:
    try:
        getattr(commitmq.plugin, name)
    except ImportError as error:
        print(name, error)
"""
    told = dict(line.split(" ", 1) for line in run(variables, code).splitlines())
    assert set(told) == {"DispatchBatch", "FilterBatch", "consumable"}
    assert {f"{one}\n" for one in told.values()} == {f"this part of commitmq {WORDS}"}


# ---------------------------------------------------------------- the command line


def test_every_verb_has_its_help(variables: dict[str, str]) -> None:
    code = """
import sys, click
from commitmq.cli.main import cli, main
def walk(group, path):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        for words in ((*path, name),):
            try:
                main([*words, "--help"])
            except SystemExit as ended:
                assert not ended.code, words
        if isinstance(command, click.Group):
            walk(command, (*path, name))
walk(cli, ())
"""
    told = run(variables, code)
    for words, _ in verbs(cli):
        assert f"Usage: commitmq {words} " in told


def test_the_verbs_of_this_test_are_the_verbs_that_need_a_node() -> None:
    assert {words for words, command in verbs(cli) if isinstance(command, NodeVerb)} == set(NODE_VERBS)


@pytest.mark.parametrize("verb", [*NODE_VERBS, *ALSO])
def test_a_verb_that_needs_the_node_says_how_to_install_it(
    verb: str, variables: dict[str, str], tmp_path: Path, golden_copy: Callable[[str], GoldenStore]
) -> None:
    store, new = golden_copy("clean").root, tmp_path / "new"
    files = sorted(store.rglob("*"))
    arguments = [one.format(store=store, new=new) for one in {**NODE_VERBS, **ALSO}[verb]]
    ended = python(variables, *COMMAND, *verb.split(), *arguments)
    what = f"`commitmq {verb}`" + (" of a closed store" if verb == "store expire" else "")
    assert ended.stderr == f"commitmq: {what} {WORDS}"
    assert (ended.returncode, ended.stdout) == (CliExit.FAILURE, "")
    assert sorted(store.rglob("*")) == files
    assert not new.exists()


def test_wrong_words_come_first(variables: dict[str, str]) -> None:
    ended = python(variables, *COMMAND, "start")
    assert ended.returncode == CliExit.USAGE
    assert "--store" in ended.stderr


def test_the_pipeline_names_its_own_extra_which_has_the_node_s(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hidden" / "pyspark.py").write_text("raise ModuleNotFoundError('it is not here', name='pyspark')\n")
    ended = python(variables, *COMMAND, "pipeline", "stats", str(tmp_path))
    assert ended.returncode == CliExit.FAILURE
    assert ended.stderr.endswith("which is not installed: pip install 'commitmq[spark]'\n")
    assert len(ended.stderr.splitlines()) == 1
    ended = python(variables, *COMMAND, "pipeline", "doctor")
    assert "Traceback" not in ended.stderr


def test_the_doctor_needs_no_node(variables: dict[str, str]) -> None:
    ended = python(variables, *COMMAND, "rocketmq", "doctor", "127.0.0.1:1", "--timeout", "0.5")
    assert ended.returncode == CliExit.NODE_UNAVAILABLE, ended.stderr
    assert ended.stdout.startswith("FAILED  name server 127.0.0.1:1: cannot connect")
    assert ended.stderr == "commitmq: no name server answers at 127.0.0.1:1\n"


def test_a_store_can_be_dumped(variables: dict[str, str], golden: GoldenStore) -> None:
    here = python(
        {**variables, "PYTHONPATH": ":".join(filter(None, sys.path))}, *COMMAND, "store", "dump", str(golden.root)
    )
    there = python(variables, *COMMAND, "store", "dump", str(golden.root))
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout
    assert {json.loads(line)["topic"] for line in there.stdout.splitlines()} >= {
        one["topic"] for one in golden.messages
    }


def test_a_plugin_that_needs_the_node_is_left_out_with_one_sentence(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hidden" / "needs_it.py").write_text("from commitmq.plugin import DispatchBatch\n")
    (tmp_path / "hidden" / "light_one.py").write_text(
        "import click\nfrom commitmq.plugin import hookimpl\n"
        "@hookimpl\ndef commitmq_register_commands(cli):\n"
        "    cli.add_command(click.Command('light-one', callback=lambda: click.echo('it is here')))\n"
    )
    wanted = {**variables, "COMMITMQ_PLUGINS": "needs_it=needs_it,light_one=light_one"}
    ended = python(wanted, *COMMAND, "light-one")
    assert (ended.returncode, ended.stdout) == (0, "it is here\n"), ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "plugin needs_it failed in import" in ended.stderr
    assert "pip install 'commitmq[node]'" in ended.stderr


# ---------------------------------------------------------------- the sentence


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (("isal",), "it needs isal, which is not installed: pip install 'commitmq[node]'"),
        (("isal", "rich"), "it needs isal and rich, which are not installed: pip install 'commitmq[node]'"),
    ],
)
def test_the_sentence_names_what_is_missing(
    absent: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError) as caught:
        extras.need("it", "node", ("isal", "rich"))
    assert str(caught.value) == words
    assert caught.value.name == absent[0]
    assert isinstance(caught.value, CommitMQError)
    assert isinstance(caught.value, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("code", "absent", "extra"),
    [
        ("from commitmq_plugins.spark import session; session('local[1]')", "pyspark", "spark"),
        ("from commitmq_plugins.spark import session; session('local[1]')", "pyarrow", "spark"),
        ("from commitmq_plugins.spark import session; session('local[1]')", "isal", "spark"),
        ("from commitmq_plugins.spark.jobs.stats import stats", "pyarrow", "spark"),
        ("from commitmq_plugins.spark.jobs.export import export", "pyspark", "spark"),
        ("from commitmq.testing import DispatcherContract", "hypothesis", "testing"),
    ],
)
def test_what_needs_another_extra_names_it(code: str, absent: str, extra: str) -> None:
    program = f"""
import sys
sys.modules[{absent!r}] = None
from commitmq import CommitMQError
from commitmq.errors import MissingExtraError
try:
    {code}
except ImportError as error:
    print(isinstance(error, CommitMQError), isinstance(error, MissingExtraError), error.name, error)
"""
    told = run(environment(), program).strip()
    assert told.startswith(f"True True {absent} ")
    assert told.endswith(f" needs {absent}, which is not installed: pip install 'commitmq[{extra}]'")
    assert len(told.splitlines()) == 1


def test_nothing_is_missing_here() -> None:
    assert extras.missing_for_node() == []
    extras.need_node("it")
    assert not extras.is_installed("there_is_no_such_module")


def test_bars_need_a_terminal_and_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert can_draw()
    monkeypatch.setitem(sys.modules, "rich", None)
    assert not can_draw()
