"""Goal: docs/security.md brings a user over the network from an empty folder, with either protocol, as the page stands.

Method: the commands of the page in their order; only the store's folder, ports and the machine's name are replaced.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commitmq.supervision.exit_codes import CliExit
from nodes import Node, commitmq, environment, free_port

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
Run = Callable[[str], str]


def commands_of(heading: str) -> list[str]:
    """The lines after the prompt in the section with this heading."""
    section = re.split(r"\n##+ ", PAGE.read_text(encoding="utf-8").partition(f"# {heading}\n")[2])[0]
    return re.findall(r"^\$ commitmq (.*)$", section, flags=re.MULTILINE)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "store")
    yield made
    if made.is_started:
        made.stop()


@pytest.fixture
def run(node: Node, tmp_path: Path) -> Run:
    home = tmp_path / "home"
    profile = home / "commitmq" / "shop.toml"

    def command(line: str) -> str:
        if node.is_started:
            line = line.replace("db.example:7310", f"127.0.0.1:{node.address.rpartition(':')[2]}")
        words = shlex.split(line)
        words = [{"/var/tmp/demo": str(node.store), "shop.toml": str(profile)}.get(one, one) for one in words]
        if words[0] == "start":
            words += [word for one in node.settings for word in ("--set", one)]
        ended = commitmq(*words, XDG_CONFIG_HOME=str(home), COMMITMQ_NODE="")
        assert ended.returncode == 0, f"{words}: {ended.stderr}"
        return ended.stdout

    return command


def test_a_new_user_comes_over_the_network(node: Node, run: Run) -> None:
    *of_the_node, of_the_client = commands_of("The first secure connection, from an empty folder")
    assert [line.split()[0] for line in of_the_node] == ["keys", "user", "start"]
    for line in of_the_node:
        run(line)
    told = node.report()["node"]
    assert told["insecure_listeners"] == []
    assert told["security"] == {"users": True, "node_keys": True, "faults": []}
    run("topic create orders --node commitmq://shop@db.example:7310")
    assert "orders" in run(of_the_client)


def test_a_client_of_rocketmq_comes_over_the_network(node: Node, run: Run) -> None:
    lines = commands_of("RocketMQ's clients over a network, from an empty folder")
    assert [line.split()[0] for line in lines] == ["keys", "user", "acl", "acl", "start"]
    ports = {name: free_port() for name in ("network.store_port", "plugins.rocketmq.namesrv_port")}
    node.settings += [*(f"{name}={port}" for name, port in ports.items()), "plugins.rocketmq.vip_port=false"]
    output = [run(line.replace("10.1.0.7", "127.0.0.1")) for line in lines]
    told = node.report()["node"]
    assert told["insecure_listeners"] == ["rocketmq_namesrv"], "nothing else is open"
    assert set(told["listeners"]) >= {"native", "rocketmq_namesrv", "rocketmq_broker"}
    (secret,) = re.findall(r"secret: (\S+)", output[1])
    servers = f"127.0.0.1:{ports['plugins.rocketmq.namesrv_port']}"
    words = ["rocketmq", "doctor", servers, "--tls", "--access-key", "shop"]

    def examined(with_secret: str) -> str:
        program = [node.python, "-m", "commitmq.cli.main", *words]
        ended = subprocess.run(
            program,
            input=with_secret + "\n",
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return ended.stdout + ended.stderr

    found = examined(secret)
    assert re.search(r"ok +broker commitmq 127\.0\.0\.1:\d+: answers", found), found
    assert "no entry of user shop allows Get on Cluster" in found, "the signature was taken"
    assert "no entry of user shop" not in examined("wrong-secret"), "and this one was not"


def test_the_first_user_of_a_store_without_keys_hears_that_the_native_protocol_asks_nobody(tmp_path: Path) -> None:
    store = ("--store", str(tmp_path))
    for prepare, is_told in ((None, True), ("keys", False)):
        if prepare is not None:
            assert commitmq(prepare, "init", *store).returncode == 0
        ended = commitmq("user", "add", f"user-{prepare}", *store)
        assert ended.returncode == 0, ended.stderr
        assert ("the store has no node keys" in ended.stderr) is is_told
        assert ended.stderr.count("\n") == int(is_told), "one sentence"


def test_a_folder_with_other_files_is_no_store_and_the_sentence_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    ended = commitmq("user", "add", "shop", "--store", str(tmp_path))
    assert ended.returncode == CliExit.STORE_UNUSABLE
    assert "start a node on it first (`commitmq start`)" in ended.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["letter.txt"]
