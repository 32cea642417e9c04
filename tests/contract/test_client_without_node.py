"""Goal: a client that was installed without the extra ``node`` does everything against a node that has it.

Method: a node as usual; beside it a program, and the command, in processes in which isal and rich cannot be
imported. The slow test makes a fresh environment of what the package needs without extras, and measures it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, NodeUnavailableError, Reader
from commitmq.supervision.exit_codes import CliExit
from environments import BareEnvironment
from nodes import Node, start_node
from without_node import HIDDEN, hide_node, python

PROGRAM = str(Path(__file__).with_name("client_program.py"))
COMMAND = ("-m", "commitmq.cli.main")
# docs/installation.md has the measured size; numpy is most of it.
LIMIT_BYTES = 110_000_000


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture(scope="module")
def variables(node: Node, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**hide_node(tmp_path_factory.mktemp("without") / "hidden"), "COMMITMQ_NODE": node.address}


def commitmq(variables: dict[str, str], *words: str, stdin: str = "") -> str:
    ended = python(variables, *COMMAND, *words, stdin=stdin)
    assert (ended.returncode, ended.stderr) == (CliExit.OK, ""), ended
    return ended.stdout


def test_every_client_works(node: Node, variables: dict[str, str]) -> None:
    ended = python(variables, PROGRAM, node.address)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == list(HIDDEN)


def test_the_node_s_own_clients_read_what_was_sent(node: Node, variables: dict[str, str]) -> None:
    commitmq(variables, "produce", "both-ways", "--key", "k", stdin="one\ntwo\n")
    with Reader("both-ways", node=node.address) as consumer:
        assert [message.body for message in consumer.poll(20)] == [b"one", b"two"]


def test_the_verbs_of_a_client_work(variables: dict[str, str]) -> None:
    assert "of-words" in commitmq(variables, "topic", "create", "of-words", "--queues", "1")
    line = json.dumps({"body": "as json", "keys": ["a"], "tags": "t"})
    assert "1 messages stored" in commitmq(variables, "produce", "of-words", "--format", "jsonl", stdin=f"{line}\n")
    assert commitmq(variables, "consume", "of-words", "--group", "readers", "--limit", "1") == "as json\n"
    (found,) = commitmq(variables, "query", "--topic", "of-words", "--key", "a", "--json").splitlines()
    assert "as json" in found
    assert "of-words" in commitmq(variables, "topic", "list")
    assert "perm rw" in commitmq(variables, "topic", "describe", "of-words")
    assert "readers" in commitmq(variables, "group", "list")
    assert "of-words" in commitmq(variables, "group", "lag", "readers")
    assert json.loads(commitmq(variables, "status", "--json"))["node"]["state"] == "ready"
    assert "consume_queue" in commitmq(variables, "dispatcher", "list")
    assert "segments" in commitmq(variables, "store", "expire", "--dry-run", "--keep-bytes", "1GiB")
    for measurement in (["produce", "--messages", "2000"], ["latency", "--count", "50"]):
        told = commitmq(variables, "bench", *measurement, "--repeat", "1", "--json")
        assert json.loads(told)["bench"] == measurement[0]
    commitmq(variables, "topic", "delete", "of-words", "--yes")


def test_the_node_can_be_stopped_from_there(variables: dict[str, str], tmp_path: Path) -> None:
    with start_node(tmp_path) as other:
        address = other.address
        commitmq(variables, "stop", "--store", str(other.store))
        with pytest.raises(NodeUnavailableError), Admin(address, timeout_s=1) as admin:
            admin.status()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_package_alone_is_small_and_sends(tmp_path: Path) -> None:
    alone = BareEnvironment(tmp_path / "venv")
    alone.install_project()
    assert alone.distributions() == {"click", "commitmq", "numpy", "orjson", "pluggy", "psutil", "pyzmq"}
    for name in HIDDEN:
        alone.check("-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)")
    assert 20_000_000 < alone.size_bytes() < LIMIT_BYTES

    command = str(alone.folder / "bin" / "commitmq")
    with start_node(tmp_path) as node:
        address: dict[str, Any] = {"COMMITMQ_NODE": node.address}
        (tmp_path / "lines").write_text("one message\n", encoding="ascii")
        alone.check("produce", "alone", "--file", str(tmp_path / "lines"), python=command, **address)
        assert alone.check("consume", "alone", "--limit", "1", python=command, **address) == "one message\n"
        assert alone.check(PROGRAM, node.address).split() == list(HIDDEN)
    refused = alone.run("start", "--store", str(tmp_path / "new"), python=command)
    assert (refused.returncode, refused.stdout) == (CliExit.FAILURE, "")
    assert refused.stderr == (
        "commitmq: `commitmq start` needs isal, which is not installed: pip install 'commitmq[node]'\n"
    )
