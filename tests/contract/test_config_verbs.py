"""Goal: a person sees every setting of a running node with its origin, and changes the live ones without a restart; a change
reaches every process, also those that start later, and outlives every death.

Method: the verbs on real nodes; what each process does with a change is looked at from outside.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import commitmq
from commitmq.cli.node_verb import address_of, request
from commitmq.config import NodeConfig
from commitmq.config.loading import flat, live_keys, live_values, with_live_values
from commitmq.errors import ProtocolError, SendError
from commitmq.supervision.exit_codes import CliExit
from nodes import Node, eventually, start_node, started


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("config")
    with start_node(folder, "retention.hours=5", COMMITMQ__GROUPS__MAX_GROUPS="77") as node:
        yield node


def ran(node: Node, *words: str, code: int = 0) -> str:
    result = node.run("config", *words, "--store", str(node.store))
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


def asked(node: Node, op: str, **fields: Any) -> dict[str, Any]:
    return request(address_of(node.store, None), op, timeout_s=10, **fields)


def value_of(node: Node, key: str) -> dict[str, Any]:
    rows = asked(node, "config.show")["settings"]
    return next(row for row in rows if row["key"] == key)


def change(node: Node, key: str, value: str) -> dict[str, Any]:
    told = asked(node, "config.set", key=key, value=value)
    assert told["not_yet"] == []
    return told


def test_every_setting_is_shown_with_its_origin(node: Node) -> None:
    rows = {row["key"]: row for row in json.loads(ran(node, "show", "--json"))}
    assert rows.keys() >= {name for name, _ in flat(NodeConfig())}
    assert {name for name, row in rows.items() if row["live"]} == live_keys()
    assert rows["retention.hours"] == {
        "key": "retention.hours", "value": 5, "default": 72, "source": "--set", "live": True
    }  # fmt: skip
    assert rows["groups.max_groups"]["source"] == "environment COMMITMQ__GROUPS__MAX_GROUPS"
    assert rows["groups.max_groups"]["value"] == 77
    assert rows["reader.count"]["source"] == "default"
    changed = json.loads(ran(node, "show", "--changed", "--json"))
    assert {"retention.hours", "groups.max_groups"} <= {row["key"] for row in changed}
    assert all(row["value"] != row["default"] for row in changed)
    table = ran(node, "show", "retention.hours")
    assert table.splitlines()[1].split() == ["retention.hours", "5", "72", "--set", "live"]
    ran(node, "show", "nothing.such", code=CliExit.USAGE)


def test_a_change_reaches_every_process_at_once(node: Node) -> None:
    told = json.loads(ran(node, "set", "log.level", "DEBUG", "--json"))
    assert told == {
        "key": "log.level", "before": "INFO", "value": "DEBUG", "source": "config set", "until_restart": False, "not_yet": []
    }  # fmt: skip
    assert value_of(node, "log.level")["source"] == "config set"
    back = json.loads(ran(node, "unset", "log.level", "--json"))
    assert (back["before"], back["value"], back["source"]) == ("DEBUG", "INFO", "default")


def test_a_rate_is_in_force_with_the_next_request_and_goes_again(node: Node) -> None:
    with commitmq.Producer(address_of(node.store, None)) as producer:
        producer.send("rated", b"x")
        change(node, "flow.topic_send_messages_per_s", "1")
        codes = []
        for _ in range(5):
            try:
                producer.send("rated", b"x", timeout_s=0.05)
            except SendError as error:
                codes.append(error.code)
        assert "SYSTEM_BUSY" in codes
        ran(node, "unset", "flow.topic_send_messages_per_s")
        for _ in range(5):
            producer.send("rated", b"x")


def test_retention_groups_and_topics_take_changes(node: Node) -> None:
    change(node, "topics.auto_create", "false")
    with (
        commitmq.Producer(address_of(node.store, None)) as producer,
        pytest.raises(commitmq.errors.CommitMQError, match="auto_create is off"),
    ):
        producer.send("never-made", b"x")
    change(node, "topics.auto_create", "true")
    change(node, "retention.check_interval_ms", "20ms")
    eventually(lambda: "expiry" in _row(node, "cleanup")["info"], "cleanup looks with its new interval")
    change(node, "groups.session_timeout_ms", "9s")
    assert value_of(node, "groups.session_timeout_ms")["value"] == 9_000


def _row(node: Node, role: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = node.report()["processes"]
    return next(row for row in rows if row["role"] == role)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("network.port", "1", "cannot be changed while the node runs: change it in the configuration file"),
        ("plugins.rocketmq.enable", "true", "cannot be changed while the node runs"),
        ("log.levle", "DEBUG", "there is no setting log.levle; keys of [log] are level"),
        ("nonsense", "1", "there is no setting 'nonsense'"),
        ("log.level", "LOUD", "must be one of DEBUG, INFO"),
        ("retention.batch_files", "0", "below the least allowed value"),
        ("groups.session_timeout_ms", "200ms", "must be at least twice"),
        ("retention.delete_when", "25", "must be hours from 0 to 23"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(node: Node, key: str, value: str, message: str) -> None:
    before = asked(node, "config.show")
    with pytest.raises(ProtocolError, match=re.escape(message)):
        asked(node, "config.set", key=key, value=value)
    assert asked(node, "config.show") == before


def test_a_refusal_has_its_exit_code(node: Node) -> None:
    assert "restart the node" in ran(node, "set", "network.port", "1", code=CliExit.FAILURE)


@pytest.mark.slow
def test_a_change_outlives_the_death_of_every_process_and_of_the_node(tmp_path: Path) -> None:
    node = Node(tmp_path / "store", "retention.hours=5", "log.format=json")
    with started(node):
        change(node, "log.max_bytes", "64KiB")
        with (node.store / "commitmq" / "node.log").open("ab") as file:
            file.write(b'{"process":"test"}\n' * 4_000)
        eventually((node.store / "commitmq" / "node.log.1").exists, "the log is rotated")
        change(node, "flow.topic_send_messages_per_s", "1000000")
        assert change(node, "retention.hours", "6")["until_restart"] is True
        os.kill(node.pids()["writer"], signal.SIGKILL)
        eventually(node.is_ready, "the writer is back")
        with commitmq.Producer(address_of(node.store, None)) as producer:
            producer.send("t", b"x")
        os.kill(node.pids()["supervisor"], signal.SIGKILL)
        eventually(node.is_ready, "the node is back")
        assert value_of(node, "retention.hours")["value"] == 6, "the same life of the node, so the change is the newest"
        assert value_of(node, "flow.topic_send_messages_per_s")["value"] == 1_000_000
        lines = [json.loads(line) for line in node.log().splitlines()]
        assert {line["process"] for line in lines} >= {"supervisor", "keeper", "writer"}, "all write to the new file"
        assert node.stop().returncode == 0
    with started(node):
        assert value_of(node, "flow.topic_send_messages_per_s")["source"] == "config set"
        assert value_of(node, "retention.hours")["value"] == 5, "--set of a new start counts"
        assert node.stop().returncode == 0
    (node.store / "commitmq" / "settings.json").write_text(
        json.dumps({"settings": {"gone.key": {"value": 1}, "log.level": {"value": "LOUD"}, "log.files": {"value": 3}}})
    )
    with started(node):
        assert value_of(node, "log.files")["value"] == 3
        assert value_of(node, "log.level")["value"] == "INFO"
        assert node.log().count("a change by `commitmq config set` is omitted") == 2


def test_live_values_are_all_that_processes_are_sent() -> None:
    config = with_live_values(NodeConfig(), {"log": {"level": "ERROR"}, "flow": {"client_pull_bytes_per_s": 9}})
    assert (config.log.level, config.flow.client_pull_bytes_per_s) == ("ERROR", 9)
    assert with_live_values(NodeConfig(), live_values(config)) == config
    # What names a file, a program, an address or a listener must never become live.
    assert not [
        name for name in live_keys() if name.startswith(("network.", "plugins.")) or "host" in name or "port" in name
    ]
    assert all(type(value) is not str for keys in live_values(NodeConfig()).values() for key, value in keys.items()
               if key not in ("level", "delete_when"))  # fmt: skip
