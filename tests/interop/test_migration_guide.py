"""Goal: who follows docs/migration.md moves from a broker of RocketMQ to a node and back, with clients at work, and loses
nothing.

Method: the page's commands run in their order, its settings as they stand there, against RocketMQ's own broker, name server
and mqadmin; only ports and folders are replaced. A producer sends all the time, and two consumers of one group read.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from broker import Broker, ClusterTool
from mqadmin import Admin

from commitmq.testing.node_process import SMALL_INDEX
from nodes import Node, commitmq, eventually, free_ports

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(400)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
TOPIC, GROUP = "Orders", "Billing"
PATIENCE_S = 60.0
ENOUGH = 20
REGISTRATION_S = 10
QUIET_S = 3.0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands() -> list[str]:
    return [
        line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")
    ]


class Place:
    """The machine of the page."""

    def __init__(
        self, folder: Path, open_broker: Callable[..., Broker], mqadmin: Admin, tool: ClusterTool, first: int
    ) -> None:
        self.folder, self._open_broker, self._mqadmin, self.tool = folder, open_broker, mqadmin, tool
        self._first = first
        self.stores: list[str] = []
        self.broker: Broker | None = None
        for name, text in zip(("node.toml", "second.toml"), blocks("toml"), strict=True):
            (folder / name).write_text(self.here(text))

    def here(self, text: str) -> str:
        """``text`` with the ports and folders of this test."""
        ports = {"9876": self._first, "10911": self._first + 4, "10921": self._first + 6}
        text = re.sub(r"\b(9876|10911|10921)\b", lambda found: str(ports[found[0]]), text)
        return text.replace("/data", str(self.folder))

    def start_broker(self) -> None:
        (text,) = blocks("properties")
        settings = dict(line.split("=", 1) for line in self.here(text).splitlines())
        assert settings.pop("storePathRootDir") == str(self.folder / "store")
        settings["registerNameServerPeriod"] = str(REGISTRATION_S * 1_000)  # the least that RocketMQ takes
        self.broker = self._open_broker(self.folder / "store", **settings)

    def stop_broker(self) -> None:
        assert self.broker is not None
        self.broker.__exit__(None, None, None)
        self.broker = None

    def run(self, command: str) -> str:
        """What the command says; it must succeed."""
        program, *words = shlex.split(self.here(command))
        if program == "mqbroker":
            assert words == ["-c", "broker.conf"]
            self.start_broker()
            return ""
        if program == "mqshutdown":
            self.stop_broker()
            return ""
        if program == "mqadmin":
            said = self._mqadmin.run(" ".join(words))
            assert "Exception" not in said, f"{command}\n{said}"
            return said
        assert program == "commitmq"
        if words[0] == "start":
            words[words.index("--config") + 1] = str(self.folder / words[words.index("--config") + 1])
            sizes = (f"commit_log.segment_bytes={1 << 20}", *SMALL_INDEX) if "second" in command else ()
            words += [word for setting in ("network.port=0", *sizes) for word in ("--set", setting)]
            self.stores.append(words[words.index("--store") + 1])
        ended = commitmq(*words)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def says(self, command: str, word: str) -> bool:
        return word in self.run(command)

    def sent(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = self.tool.ask("sent")
        return found

    def clients_go_on(self, broker: str) -> None:
        """Sends to this broker are acknowledged, and the group receives them."""
        before = len(self.sent().get(broker, ()))
        eventually(lambda: len(self.sent().get(broker, ())) >= before + ENOUGH, f"sends to {broker}", PATIENCE_S)
        wanted = set(self.sent()[broker])
        eventually(partial(self.has_all, broker, wanted), f"messages of {broker}", PATIENCE_S)

    def has_all(self, broker: str, wanted: set[str]) -> bool:
        """Whether the group has these messages of the broker."""
        return wanted <= set(self.tool.ask("got", GROUP).get(broker, ()))

    def differences(self, broker: str) -> list[int]:
        """The column Diff of the broker's queues in consumerProgress."""
        said = self.run(f"mqadmin consumerProgress -n 127.0.0.1:9876 -g {GROUP}")
        rows = [line.split() for line in said.splitlines() if line.startswith(f"{TOPIC} ") and broker in line]
        assert rows, said
        return [int(row[5]) for row in rows]

    def drained(self, broker: str) -> bool:
        """Nothing was sent to it for a while, and the group has everything of it."""
        before = len(self.sent()[broker])
        time.sleep(QUIET_S)
        return before == len(self.sent()[broker]) and set(self.differences(broker)) == {0}

    def end(self) -> None:
        if self.broker is not None:
            self.broker.kill()
        for store in self.stores:
            Node(Path(store)).end()


def test_the_page_moves_a_broker_and_a_cluster(
    tmp_path: Path,
    rocketmq_broker: Callable[..., Broker],
    cluster_tool: Callable[..., ClusterTool],
    mqadmin: Admin,
) -> None:
    first = free_ports(8)
    names = f"127.0.0.1:{first}"
    with contextlib.ExitStack() as stack:
        tool = cluster_tool(tmp_path, names, serves=True)
        stack.callback(tool.kill)
        place = Place(tmp_path, rocketmq_broker, mqadmin, tool, first)
        stack.callback(place.end)
        place.start_broker()
        place.run(f"mqadmin updateTopic -n 127.0.0.1:9876 -c DefaultCluster -t {TOPIC} -r 4 -w 4")
        for _ in range(2):
            tool.ask("consume", GROUP, TOPIC)
        tool.ask("begin", TOPIC, 20)
        place.clients_go_on("broker-a")

        done: list[str] = []
        for command in commands():
            if "wipeWritePerm" in command and not any("wipeWritePerm" in one for one in done):
                time.sleep(REGISTRATION_S + 1)  # as the page says: topics were changed a moment ago
            said = place.run(command)
            done.append(command)
            match command.split():
                case ["commitmq", "start", *_] | ["mqbroker", *_] | ["mqadmin", "addWritePerm", *_]:
                    place.clients_go_on("broker-a")
                case ["mqadmin", "clusterList", *_]:
                    eventually(partial(place.says, command, "broker-b"), "broker-b is registered", PATIENCE_S)
                case ["mqadmin", "updateTopic", *_]:
                    place.clients_go_on("broker-b")
                case ["mqadmin", "wipeWritePerm", *_]:
                    place.clients_go_on("broker-b")
                    eventually(lambda: place.drained("broker-a"), "broker-a is drained", PATIENCE_S)
                case ["commitmq", "rocketmq", "doctor", *_]:
                    assert "FAILED" not in said
        assert len([one for one in done if one.startswith("commitmq rocketmq doctor")]) >= 5, "the page was read"

        place.clients_go_on("broker-b")
        tool.ask("end")
        for broker, bodies in place.sent().items():
            eventually(partial(place.has_all, broker, set(bodies)), f"everything of {broker} was received", PATIENCE_S)
