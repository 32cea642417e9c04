"""The name server's own settings under RocketMQ's names, which tools read and change (requests 318 and 319).

What a tool changes lasts until the process ends; the plugin's section of the node's configuration is what stays.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from commitmq_plugins.rocketmq.remoting.errors import RemotingError

BLACK_LIST: Final = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})


class BlackListError(RemotingError):
    """A setting that no tool may change."""


@dataclass(slots=True)
class NamesrvConfig:
    """The settings that change what this name server does. The others of RocketMQ's have their values there."""

    order_message_enable: bool = False
    return_order_topic_config_to_broker: bool = True
    enable_all_topic_list: bool = True
    enable_topic_list: bool = True
    scan_not_active_broker_interval: int = 5_000
    listen_port: int = 9876
    kv_config_path: str = ""

    def to_text(self) -> str:
        """Lines ``key=value``, in the order of their keys."""
        values = {_java_name(one.name): getattr(self, one.name) for one in fields(self)}
        values |= {
            "clusterTest": False,
            "configBlackList": "configBlackList;configStorePath;kvConfigPath",
            "deleteTopicWithBrokerRegistration": False,
            "needWaitForService": False,
            "notifyMinBrokerIdChanged": False,
            "productEnvName": "center",
            "supportActingMaster": False,
        }
        texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}
        return "".join(f"{key}={texts[key]}\n" for key in sorted(texts))

    def update(self, text: str) -> None:
        """Take the switches among the lines ``key=value``; unknown keys are ignored. Raises BlackListError."""
        values = dict(parse_properties(text))
        if not BLACK_LIST.isdisjoint(values):
            raise BlackListError("Can not update config in black list.")
        for one in fields(self):
            value = values.get(_java_name(one.name))
            if value is not None and isinstance(getattr(self, one.name), bool):
                setattr(self, one.name, value.lower() == "true")


def parse_properties(text: str) -> list[tuple[str, str]]:
    """The pairs in a text of Java's properties: ``key=value`` or ``key: value``, comments after ``#`` or ``!``."""
    pairs = []
    for line in text.splitlines():
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        at = min((found for mark in "=:" if (found := line.find(mark)) >= 0), default=len(line))
        pairs.append((line[:at].strip(), line[at + 1 :].strip()))
    return pairs


def _java_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)
