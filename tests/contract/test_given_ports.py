"""Goal: a port that two settings give away refuses the start, before it touches the store, with both names; a server whose
port another program has is told of by the start and by ``status``, and serves once the port is free.

Method: the real command, with one port of each server in the node's block, and a listener of this process in the way.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from commitmq.supervision.exit_codes import CliExit
from nodes import Node, eventually, free_port, free_ports

ROCKETMQ = "plugins.rocketmq.enable=true"


@pytest.mark.parametrize(
    ("key", "name", "enable"),
    [
        ("metrics.port", "metrics", "metrics.enable=true"),
        ("network.store_port", "rocketmq", ROCKETMQ),
        pytest.param("plugins.rocketmq.namesrv_port", "rocketmq_namesrv", ROCKETMQ, marks=pytest.mark.slow),
        pytest.param("plugins.dashboard.port", "dashboard", "plugins.dashboard.enable=true", marks=pytest.mark.slow),
    ],
)
def test_a_port_of_the_nodes_own_block_is_refused_by_the_names_of_both_settings(
    tmp_path: Path, key: str, name: str, enable: str
) -> None:
    first = free_ports(38)
    node = Node(tmp_path / "store", f"network.port={first}", enable, f"{key}={first + 4}")
    try:
        done = node.start()
        assert done.returncode == CliExit.CONFIG_ERROR, done.stderr
        told = f"network.port={first} (+4) gives it to dispatcher-consume_queue, and {key}={first + 4} to {name}"
        assert told in done.stderr
        assert not (node.store / "commitlog").exists(), "the store was opened"
    finally:
        node.end()


def metrics_row(node: Node) -> dict[str, Any]:
    return next(row for row in node.report()["processes"] if row["role"] == "worker-metrics")


def test_a_server_without_its_port_is_told_of_and_comes_once_the_port_is_free(tmp_path: Path) -> None:
    settings = ("metrics.enable=true", f"metrics.port={free_port()}", "supervisor.restart_backoff_max_ms=500")
    port = int(settings[1].partition("=")[2])
    node = Node(tmp_path / "store", *settings)
    with socket.create_server(("127.0.0.1", port)):
        done = node.start()
        try:
            assert done.returncode == 0, "the node takes messages"
            warning = next(line for line in done.stderr.splitlines() if line.startswith("WARNING"))
            assert "the server metrics does not serve and is tried again" in warning
            assert f"metrics cannot listen on 127.0.0.1:{port}" in warning
            assert "(metrics.host, metrics.port)" in warning
            row = metrics_row(node)
            assert row["state"] != "ready"
            assert f"metrics cannot listen on 127.0.0.1:{port}" in row["last_error"]
        except BaseException:
            node.end()
            raise
    try:
        assert eventually(lambda: metrics_row(node)["state"] == "ready", "it serves", 30)
    finally:
        node.end()
