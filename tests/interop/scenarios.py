"""Scenarios of RocketMQ's clients (the Java program in ``scenarios/``), at a node and at RocketMQ's own broker."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from broker import Broker, Tool
from java_project import scenarios

from nodes import eventually, free_ports, start_node

_THREADS = 10
_PATIENCE_S = 240.0
_SEGMENT_BYTES = 16 << 20

# What differs from the defaults, the same for both: short times, and what RocketMQ has off.
ROCKETMQ = {
    "brokerName": "commitmq",
    "brokerClusterName": "DefaultCluster",
    "mappedFileSizeCommitLog": _SEGMENT_BYTES,
    "maxHashSlotNum": 1_000,
    "maxIndexNum": 20_000,
    "enablePropertyFilter": "true",
    "recallMessageEnable": "true",
    "traceTopicEnable": "true",
    "waitTimeMillsInSendQueue": 30_000,  # on a busy machine it would refuse sends
}
NODE = (
    "plugins.rocketmq.enable=true",
    "plugins.rocketmq.vip_port=false",
    "plugins.rocketmq.trace_topic_enable=true",
    f"commit_log.segment_bytes={_SEGMENT_BYTES}",
    "transaction.timeout_ms=1000",
    "transaction.check_interval_ms=1000",
)


@dataclass(frozen=True)
class Side:
    """A broker and its name server."""

    name: str
    name_server: str
    broker: str


@contextlib.contextmanager
def both_sides(folder: Path, open_broker: Callable[..., Broker]) -> Iterator[tuple[Side, Side]]:
    """RocketMQ's broker ("theirs") and a node ("ours"), each with its own name server."""
    names, theirs, our_names, ours = range(first := free_ports(4), first + 4)
    with (
        open_broker(folder / "theirs", namesPort=names, listenPort=theirs, **ROCKETMQ),
        start_node(folder, *NODE, f"plugins.rocketmq.namesrv_port={our_names}", f"network.store_port={ours}"),
    ):
        for port in (our_names, ours):  # the node is ready before its servers of this protocol are
            eventually(partial(_listens, port), f"a server listens on port {port}", 60)
        yield (
            Side("theirs", f"127.0.0.1:{names}", f"127.0.0.1:{theirs}"),
            Side("ours", f"127.0.0.1:{our_names}", f"127.0.0.1:{ours}"),
        )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class ScenarioProgram(Tool):
    """The clients of one version, in one JVM that runs several scenarios at a time."""

    def __init__(self, version: str, folder: Path, sides: Iterable[Side]) -> None:
        self._sides = tuple(sides)
        mark = "v" + version.replace(".", "-")
        command = ["-cp", scenarios(version).build(), "commitmq.scenarios.Scenarios", mark, str(_THREADS)]
        super().__init__(command, folder / f"clients-{mark}")

    def begin(self, names: Iterable[str]) -> None:
        """Run them at both sides, in this order as far as threads are free."""
        for name in names:
            for side in self._sides:
                self.ask("begin", name, side.name, side.name_server, side.broker)

    def outcomes(self, name: str) -> tuple[Any, ...]:
        """What the scenario saw at each side. Raises AssertionError when it could not end at one of them."""
        deadline = time.monotonic() + _PATIENCE_S
        found: dict[str, Any] = {}
        while len(found) < len(self._sides):
            for side in self._sides:
                if side.name not in found and (answer := self.ask("result", name, side.name)) is not None:
                    found[side.name] = answer
            assert time.monotonic() < deadline, f"{name} has not ended after {_PATIENCE_S} s"
            time.sleep(0.05)
        broken = {side: answer["broken"] for side, answer in found.items() if "broken" in answer}
        assert not broken, f"{name} could not end: {broken}"
        return tuple(found[side.name]["outcome"] for side in self._sides)
