"""Goal: a node with the settings of the shipped pod is reachable for other machines, safe, and healthy for its probes.

Method: the pod's first container and then its node run here, with the environment of the manifest; only the ports are free
ones. The probes are the manifest's own commands. No cluster is there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import commitmq
from commitmq.errors import CommitMQError
from nodes import Node, environment, eventually, started
from pod import container, first_container, variables

pytestmark = pytest.mark.slow


class PodNode(Node):
    """With the variables of the pod for the node, and its own for commands."""

    def environment(self, **extra: str) -> dict[str, str]:
        return environment(**variables(), **extra)


def probe(name: str, port: int) -> bool:
    """Whether the pod's probe ``name`` succeeds, sent to ``port``."""
    command: list[Any] = list(container()[name]["exec"]["command"])
    assert command[0] == "python3"
    command = [sys.executable, *(re.sub(r":9311/", f":{port}/", word) for word in command[1:])]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def test_a_node_as_in_the_pod(tmp_path: Path) -> None:
    node = PodNode(tmp_path / "store", "metrics.port=0")
    subprocess.run(first_container(node.store), check=True, env=environment(), capture_output=True)
    with started(node):
        (port,) = re.findall(r"metrics are served host=0\.0\.0\.0 port=(\d+)", node.log())
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            eventually(lambda name=name: probe(name, int(port)), f"{name} succeeds")  # type: ignore[misc]
        report = node.report()["node"]
        assert report["insecure_listeners"] == ["metrics"]
        host = node.address.removeprefix("tcp://")
        with pytest.raises(CommitMQError), commitmq.Producer(f"tcp://{host}") as stranger:
            stranger.send("orders", b"one", timeout_s=3)
        profile = tmp_path / ".config" / "commitmq" / "shop.toml"
        profile.parent.mkdir(parents=True)
        words = (
            "user",
            "add",
            "shop",
            "--super",
            "--profile-for",
            host,
            "--output",
            str(profile),
            "--store",
            str(node.store),
        )
        added = node.run(*words)
        assert added.returncode == 0, added.stderr
        client = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config")}
        made = node.run("topic", "create", "orders", "--node", f"commitmq://shop@{host}", **client)
        assert made.returncode == 0, made.stderr
        assert node.run("status", "--store", str(node.store)).returncode == 0
    assert not probe("livenessProbe", int(port)), "a node that is gone is not healthy"
