"""Goal: a zero byte in a property is a message like any other, whatever happens to the node and whoever used it before.

Method: single sends and runs with such properties, acknowledged as flushed; the node is killed, stopped, verified, rebuilt,
and its store opened as if RocketMQ had left it after a crash. Each time every message is where it was acknowledged.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_kill9 import SETTINGS

from commitmq import Message, Producer, Reader
from commitmq.client import properties as client_properties
from nodes import Node, commitmq, start_node

VALUES = ("a\0b", "\0", "\0" * 300, "x" * 600 + "\0" * 511, "plain")


def found(node: Node) -> list[tuple[int, str]]:
    """Number and property of every message, in queue order."""
    messages = []
    with Reader(queues=[("orders", 0)], node=node.address) as consumer:
        while batch := consumer.poll(1.0):
            messages += [(int(one.body), one.properties["a"]) for one in batch]
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("crc", [pytest.param("true", marks=pytest.mark.long), "false"])
def test_a_zero_byte_in_a_property_costs_nothing(tmp_path: Path, crc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ours refuses them before it sends; the protocol and RocketMQ's clients do not.
    monkeypatch.setattr(client_properties, "_check_text", lambda _what, text: text)
    settings = (*SETTINGS, f"commit_log.append_properties_crc={crc}")
    sizes = [part for one in settings for part in ("--set", one)]
    sent: list[tuple[int, str]] = []

    def send(node: Node) -> None:
        with Producer(node.address, timeout_s=10) as producer:
            for value in VALUES:
                producer.send("orders", b"%d" % len(sent), queue=0, properties={"a": value})
                sent.append((len(sent), value))
            run = list(enumerate(VALUES, len(sent)))
            messages = [Message(b"%d" % number, properties={"a": value}) for number, value in run]
            producer.send_batch("orders", messages, queue=0)
            sent.extend(run)

    with start_node(tmp_path, *settings) as node:
        send(node)
        node.kill_all()
        ended = node.start()
        assert ended.returncode == 0, ended.stderr
        assert found(node) == sent
        send(node)
        assert node.stop().returncode == 0
        verified = commitmq("store", "verify", str(node.store), *sizes)
        assert verified.returncode == 0, verified.stdout
        rebuilt = commitmq("store", "rebuild", str(node.store), *sizes)
        assert rebuilt.returncode == 0, rebuilt.stderr
        ended = node.start()
        assert ended.returncode == 0, ended.stderr
        assert found(node) == sent
        send(node)
        node.kill_all()
        # What RocketMQ leaves when it is killed: its own files, and nothing that says how far to trust them.
        shutil.rmtree(node.store / "commitmq")
        (node.store / "abort").write_text("4711")
        ended = node.start()
        assert ended.returncode == 0, ended.stderr
        assert found(node) == sent
