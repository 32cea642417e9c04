"""Goal: the settings of a group are RocketMQ's, survive any death once they are acknowledged, and the node obeys them.

Method: a real node, its file ``subscriptionGroup.json``, a coordinator that is killed, and consumers of a group that is
switched off and on.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from commitmq import Admin, Consumer, GroupNotFoundError, Producer, ProtocolError, ShareConsumer
from nodes import Node, commitmq, eventually, start_node

pytestmark = pytest.mark.timeout(120)
SETTINGS = ("groups.heartbeat_interval_ms=200", "topics.default_queues=1", "supervisor.restart_backoff_max_ms=300")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("config"), *SETTINGS, "groups.auto_create=false") as made:
        yield made


@pytest.fixture
def admin(node: Node) -> Iterator[Admin]:
    with Admin(node.address) as made:
        yield made


def file(node: Node) -> dict[str, Any]:
    text = (node.store / "config" / "subscriptionGroup.json").read_text()
    return dict(json.loads(text)["subscriptionGroupTable"])


def test_what_was_acknowledged_is_in_the_file(node: Node, admin: Admin) -> None:
    with pytest.raises(GroupNotFoundError):
        admin.group_config("made")
    made = admin.group_config("made", {"retryMaxTimes": 3, "retryQueueNums": 2})
    assert file(node)["made"] == made
    assert (made["retryMaxTimes"], made["retryQueueNums"], made["consumeEnable"]) == (3, 2, True)
    admin.group_config("made", {"consumeBroadcastEnable": False})
    pid = node.pids()["coordinator"]
    os.kill(pid, signal.SIGKILL)
    eventually(partial(node.healed, "coordinator", pid), "the coordinator is back")
    after = admin.group_config("made")
    assert after == made | {"consumeBroadcastEnable": False}
    assert admin._ask("coordinator", "group.retry_topics", {"group": "made"})["max_retries"] == 3
    assert admin.topic("%RETRY%made").read_queues == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"consumeEnabled": True}, "there is no setting 'consumeEnabled'"),
        ({"consumeEnable": 1}, "consumeEnable must be true or false"),
        ({"retryMaxTimes": -1}, "retryMaxTimes must be an integer from 0"),
        ({"retryMaxTimes": True}, "retryMaxTimes must be an integer"),
        ({"retryQueueNums": 5_000}, "from 0 to 1024"),
        ({"groupName": "x"}, "there is no setting 'groupName'"),
    ],
    ids=str,
)
def test_wrong_settings_change_nothing(node: Node, admin: Admin, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        admin.group_config("wrong", {"consumeTimeoutMinute": 5, **changes})
    with pytest.raises(GroupNotFoundError):
        admin.group_config("wrong")


def test_a_group_that_shares_queues_is_switched_off_at_once(node: Node, admin: Admin) -> None:
    admin.group_config("so", {})
    with Producer(node.address) as producer, ShareConsumer("shared-off", group="so", node=node.address) as consumer:
        producer.send("shared-off", b"1")
        assert [one.body for one in consumer.receive(wait_s=10)] == [b"1"]
        producer.send("shared-off", b"2")
        admin.group_config("so", {"consumeEnable": False})
        with pytest.raises(ProtocolError, match="group so may not consume"):
            consumer.receive(wait_s=10)
        admin.group_config("so", {"consumeEnable": True})
        assert [one.body for one in consumer.receive(wait_s=10)] == [b"2"]


def test_a_group_that_is_switched_off_is_refused_with_the_reason(node: Node, admin: Admin) -> None:
    admin.group_config("off", {})
    with Producer(node.address) as producer, Consumer("off", group="off", node=node.address) as consumer:
        producer.send("off", b"1")
        eventually(lambda: len(consumer.poll(0.1)) == 1, "it reads")
        admin.group_config("off", {"consumeEnable": False})

        def is_refused() -> bool:
            try:
                consumer.poll(0.1)
            except ProtocolError as error:
                assert error.code == "NO_PERMISSION"
                assert "consumeEnable is off" in str(error)
                return True
            return False

        eventually(is_refused, "the member hears of it")
        for kind in (Consumer, ShareConsumer):
            with (
                pytest.raises(ProtocolError, match="group off may not consume"),
                kind("off", group="off", node=node.address) as other,
            ):
                other.poll() if isinstance(other, Consumer) else other.receive()
        assert admin.reset_offsets("off", "off", "earliest", running=True) == [("off", 0, 0)], "it can be moved"
        admin.group_config("off", {"consumeEnable": True})
        producer.send("off", b"2")

        def reads() -> bool:
            try:
                return any(one.body == b"2" for one in consumer.poll(0.1))
            except ProtocolError:
                return False

        eventually(reads, "it goes on when it is switched on")


def test_the_command_line(node: Node) -> None:
    def run(*words: str) -> Any:
        return commitmq("group", "config", *words, "--node", node.address)

    assert run("shell").returncode == 1
    done = run("shell", "--set", "consumeMessageOrderly=true", "--set", "retryMaxTimes=2", "--json")
    assert json.loads(done.stdout) == json.loads(run("shell", "--json").stdout)
    assert json.loads(done.stdout)["consumeMessageOrderly"] is True
    assert "retryMaxTimes                   2" in run("shell").stdout
    assert run("shell", "--set", "retryMaxTimes").returncode == 2
    assert "must be an integer" in run("shell", "--set", "retryMaxTimes=many").stderr
