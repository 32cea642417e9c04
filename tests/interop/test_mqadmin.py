"""Goal: RocketMQ's mqadmin shows and changes the node as it does RocketMQ's own broker.

Method: the same commands, in the same order, against a node and against a broker of RocketMQ, each behind a name server.
Outputs must be equal after what depends on time, place or the two programs' names for their own topics is taken out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mqadmin import Admin

from nodes import free_ports, start_node

pytestmark = [pytest.mark.slow]
_TAKEN_OUT = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?"), "TIME"),
    (re.compile(r"\b1[6-9]\d{11}\b"), "MS"),
    (re.compile(r"127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"\b[0-9A-F]{32,}\b"), "ID"),
)

COMMANDS = (
    "updateTopic -b {broker} -t T1 -r 4 -w 3 -a +message.type=NORMAL",
    "updateTopic -b {broker} -t T1 -r 4 -w 3 -a +queue.type=BatchCQ",
    "topicRoute -n {names} -t T1",
    "sendMessage -n {names} -t T1 -p hello -k K1 -b {name} -i 1",
    "topicStatus -n {names} -t T1",
    "updateSubGroup -b {broker} -g G1 -r 5 -q 2",
    "getConsumerConfig -n {names} -g G1",
    "resetOffsetByTime -n {names} -g G1 -t T1 -s -1",
    "resetOffsetByTime -n {names} -g nobody -t T1 -s -1",
    "brokerConsumeStats -b {broker}",
    "cloneGroupOffset -n {names} -s G1 -d G2 -t T1",
    "consumerConnection -n {names} -g G1",
    "haStatus -b {broker}",
    "cleanExpiredCQ -b {broker}",
    "cleanUnusedTopic -b {broker}",
    "updateBrokerConfig -b {broker} -k longPollingEnable -v true",
    "deleteSubGroup -n {names} -b {broker} -g G1 -r true",
    "deleteTopic -n {names} -c {cluster} -t T1",
    "topicStatus -n {names} -t T1",
)


def _comparable(text: str) -> list[str]:
    """Lines without what differs from run to run, and without stack traces."""
    for pattern, word in _TAKEN_OUT:
        text = pattern.sub(word, text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip() and not line.startswith("\tat ")]


def _outputs(mqadmin: Admin, names: int, broker: int) -> dict[str, list[str]]:
    places = {"names": f"127.0.0.1:{names}", "broker": f"127.0.0.1:{broker}", "name": "commitmq",
              "cluster": "DefaultCluster"}  # fmt: skip
    return {
        f"{at} {command}": _comparable(mqadmin.run(command.format(**places))) for at, command in enumerate(COMMANDS)
    }


@pytest.mark.long
@pytest.mark.xfail(reason="the outputs are not compared to the last command yet", strict=False)
def test_mqadmin_prints_the_same_for_a_node_and_for_rocketmq(
    mqadmin: Admin, rocketmq_broker: Callable[..., Any], tmp_path: Path
) -> None:
    first = free_ports(4)
    theirs_names, theirs, ours_names, ours = range(first, first + 4)
    with rocketmq_broker(
        tmp_path / "theirs",
        namesPort=theirs_names,
        listenPort=theirs,
        brokerName="commitmq",
        brokerClusterName="DefaultCluster",
    ):
        expected = _outputs(mqadmin, theirs_names, theirs)
    mqadmin.restart()
    with start_node(
        tmp_path,
        f"network.store_port={ours}",
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv_port={ours_names}",
    ):
        found = _outputs(mqadmin, ours_names, ours)
    for command, lines in expected.items():
        assert found[command] == lines, command


def test_every_command_of_administration_answers(mqadmin: Admin, tmp_path: Path) -> None:
    names = free_ports(2)
    broker = names + 1
    with start_node(
        tmp_path,
        f"network.store_port={broker}",
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv_port={names}",
    ):
        ns, at = f"-n 127.0.0.1:{names}", f"-b 127.0.0.1:{broker}"
        assert "create topic to 127.0.0.1" in mqadmin.run(f"updateTopic {at} -t T1 -r 4 -w 3")
        assert "SEND_OK" in mqadmin.run(f"sendMessage {ns} -t T1 -p hello")
        assert sum(line.startswith("commitmq ") for line in mqadmin.run(f"topicStatus {ns} -t T1").splitlines()) == 4
        assert "V5_4_0" in mqadmin.run(f"clusterList {ns}")
        assert "success" in mqadmin.run(f"updateSubGroup {at} -g G1 -r 5")
        assert "retryMaxTimes" in mqadmin.run(f"getConsumerConfig {ns} -g G1")
        assert "#offset" in mqadmin.run(f"resetOffsetByTime {ns} -g G1 -t T1 -s -1")
        assert "Diff Total: 0" in mqadmin.run(f"brokerConsumeStats {at}")
        assert "commitLogDirCapacity" in mqadmin.run(f"brokerStatus {at}")
        assert "delete topic [T1] from cluster" in mqadmin.run(f"deleteTopic {ns} -c DefaultCluster -t T1")
        assert "No topic route info" in mqadmin.run(f"topicStatus {ns} -t T1")
