"""RocketMQ's mqadmin, and the clients and programs beside it: the Java program AdminTool in ``java/``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from broker import Tool

CLUSTER: Final = "DefaultCluster"
BROKER: Final = "commitmq"
_TAKEN_OUT: Final = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?"), "TIME"),
    (re.compile(r"\b1[6-9]\d{11}\b|\b20\d{12}(\d{3})?\b"), "MS"),
    (re.compile(r"@[0-9a-f]{5,8}\b|\b0x[0-9a-f]+\b"), "OBJECT"),
    (re.compile(r"127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"\b[0-9A-F]{32,}\b"), "ID"),
    (re.compile(r"\b\d+(\.\d+)?ms\b|(?<=spentTimeMills=)\d+|(?<=^commitmq \d true )\d+$"), "DURATION"),
    (re.compile(r"(?<=\s)\d+\.\d+(E-\d+)?\b"), "RATE"),
    (re.compile(r"(?<=OK, )[1-9]\d*$|(?<=^#MasterCommitLogMaxOffset )\d+$"), "NUMBER"),
)
_LEFT_OUT: Final = re.compile(rf"(%RETRY%|RMQ_SYS_)\S+ (\S+ )?{BROKER} \d")
"""A client comes to the queues of its retry topic some time in its first minute; both programs read their own topics."""


class Admin(Tool):
    """One JVM that runs commands of mqadmin, and all else that asks one cluster. It writes below ``home``."""

    def __init__(self, class_path: str, home: Path, names: int = 0, broker: int = 0) -> None:
        """``names`` and ``broker``: the ports of the name server and of the broker; without them commands name their own."""
        self.places = {
            "names": f"127.0.0.1:{names}",
            "broker": f"127.0.0.1:{broker}",
            "name": BROKER,
            "cluster": CLUSTER,
            "home": str(home),
        }
        address = [self.places["names"], self.places["broker"], BROKER, CLUSTER]
        self.home = home
        super().__init__(["-cp", class_path, "commitmq.interop.AdminTool", *address], home)

    def run(self, command: str) -> str:
        """What the command printed. ``{broker}`` and the other places are filled in, where the cluster is known."""
        if self.places["names"].endswith(":0"):
            return str(self.ask(*command.split()))
        return str(self.ask(*f"{command} -n {{names}}".format(**self.places).split()))


def comparable(text: str) -> list[str]:
    """Lines without what differs from run to run, in any order, and without stack traces."""
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith(("\tat ", "\t... ")):
            continue
        words = " ".join(line.split())
        for pattern, word in _TAKEN_OUT:
            words = pattern.sub(word, words)
        if not _LEFT_OUT.match(words):
            found.append(words)
    return sorted(found)


def exported(home: Path, name: str) -> Any:
    """A file that a command has exported."""
    return json.loads((home / name).read_text(encoding="utf-8"))
