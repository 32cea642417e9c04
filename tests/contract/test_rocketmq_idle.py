"""Goal: connected clients that do nothing cost little memory and hardly any time, however many there are.

Method: consumers that have joined their groups and send a heartbeat each 30 s, as RocketMQ's do; memory and processor time of
the servers are read from the system. The long version has 2,000 of them, and prints what it found.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from commitmq import Admin
from nodes import Node
from rocketmq_peer import Peer, heartbeat, served_node

SERVER, COORDINATOR = "worker-rocketmq_broker", "coordinator"
GROUP_MEMBERS = 20


def seconds(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4_096


async def idle(node: Node, port: int, count: int, measured_s: float) -> dict[str, float]:
    """Connect ``count`` consumers; shares of a processor while they are idle."""
    pids = {role: node.pids()[role] for role in (SERVER, COORDINATOR)}
    peers = [Peer(port) for _ in range(count)]
    try:
        for number, peer in enumerate(peers):
            group = f"idle{number // GROUP_MEMBERS}"
            await peer.until(heartbeat(f"client@{number}", group, "quiet"))
        await asyncio.sleep(5.0)  # the groups have settled
        before = {role: seconds(pid) for role, pid in pids.items()}
        began = time.monotonic()
        while (passed := time.monotonic() - began) < measured_s:
            await asyncio.sleep(0.5)
            due = [peer for number, peer in enumerate(peers) if number % 60 == int(passed * 2) % 60]
            for peer in due:
                number = peers.index(peer)
                await peer.until(heartbeat(f"client@{number}", f"idle{number // GROUP_MEMBERS}", "quiet"))
        took = time.monotonic() - began
        found = {role: (seconds(pid) - before[role]) / took for role, pid in pids.items()}
        found["memory"] = float(resident_bytes(pids[SERVER]))
        return found
    finally:
        for peer in peers:
            await peer.close()


@pytest.mark.parametrize(
    ("count", "measured_s"), [(100, 4.0), pytest.param(2_000, 60.0, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_idle_clients_cost_little(tmp_path: Path, count: int, measured_s: float) -> None:
    settings = ("plugins.rocketmq.max_connections=3000", "plugins.rocketmq.max_groups_per_connection=10")
    with served_node(tmp_path, *settings) as (node, port, _):
        with Admin(node.address) as admin:
            admin.topic_create("quiet", 20)
        found = asyncio.run(idle(node, port, count, measured_s))
        sys.stdout.write(f"{count} idle clients: {found}\n")
        assert found["memory"] < 200_000_000
        assert found[SERVER] < 0.06
        assert found[COORDINATOR] < 0.06
