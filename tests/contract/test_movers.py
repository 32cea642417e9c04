"""Goal: a mover runs when its node has, or had, a message for it, and not before; a client can ask for one.

Method: real nodes; ``schedule`` stands for every mover. Their processes are killed, and halted before they dispatch.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from commitmq import Producer
from commitmq.errors import ProtocolError
from commitmq.protocol.directory import Directory
from nodes import Node, eventually, free_ports, start_node


def schedule(node: Node) -> dict[str, Any]:
    return node.row("schedule")


def runs(node: Node) -> bool:
    return bool(schedule(node)["state"] == "ready")


def ask(node: Node, role: str) -> None:
    """Request ``mover.start``. Raises ProtocolError."""
    directory = Directory(node.address)
    try:
        directory.request("mover.start", {"role": role}, timeout_s=10)
    finally:
        directory.close()


def test_a_mover_starts_with_the_first_message_and_comes_back(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        with Producer(node.address) as producer:
            producer.send("plain", b"now")
            time.sleep(0.5)
            assert schedule(node)["state"] == "idle"
            assert schedule(node)["pid"] is None
            producer.send("later", b"soon", delay_level=1)
        eventually(lambda: runs(node), "the mover runs")
        os.kill(schedule(node)["pid"], signal.SIGKILL)
        eventually(lambda: runs(node) and schedule(node)["restarts"] == 1, "the mover runs")
    with start_node(tmp_path) as node:
        eventually(lambda: runs(node), "the mover runs")  # its topic exists


def test_a_mover_is_needed_although_its_message_was_not_dispatched_before_all_died(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        os.kill(node.pids()["dispatcher-consume_queue"], signal.SIGSTOP)
        with Producer(node.address, timeout_s=5) as producer:
            producer.send("later", b"soon", delay_level=1, ack="memory")
        node.kill_all()
    with start_node(tmp_path) as node:
        eventually(lambda: runs(node), "the mover runs")


def test_a_client_asks_for_a_mover(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        ask(node, "schedule")
        ask(node, "schedule")
        eventually(lambda: runs(node), "the mover runs")
        with pytest.raises(ProtocolError, match="there is no mover 'writer'"):
            ask(node, "writer")


def test_a_mover_that_is_turned_off_does_not_start(tmp_path: Path) -> None:
    expected = pytest.raises(ProtocolError, match="runs no schedule process")
    with start_node(tmp_path, "schedule.enable=false") as node, expected:
        ask(node, "schedule")


def test_a_mover_whose_port_another_program_took_says_so_and_comes_when_it_is_free(tmp_path: Path) -> None:
    base = free_ports()
    with start_node(tmp_path, f"network.port={base}") as node:
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", base + 36))
            taken.listen()
            ask(node, "pop")
            sentence = f"port {base + 36} is in use by process {os.getpid()} ("
            eventually(lambda: sentence in (node.row("pop")["last_error"] or ""), "the port is named")
            assert "--set network.port=PORT" in node.row("pop")["last_error"]
            ended = "exit code 72 (ADDRESS_IN_USE)"
            eventually(lambda: node.row("pop")["last_exit"] == ended, "it ends with the code of a port in use")
        eventually(lambda: bool(node.row("pop")["state"] == "ready"), "the mover runs")
    assert "Traceback" not in node.log()
