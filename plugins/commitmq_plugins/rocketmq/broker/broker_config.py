"""The node's settings under the names of RocketMQ's broker.conf: requests 25 and 26 (remoting 1.10).

What the node can change while it runs is changed until it stops. Another value for anything else is refused, so that nobody
believes that it counts; the sentence says where the setting is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from commitmq.config import NodeConfig
from commitmq.semantics.delay import DELAY_LEVELS_MS
from commitmq.semantics.trace import TRACE_TOPIC
from commitmq_plugins.rocketmq.broker.node import REGION

LOCKED: Final = frozenset({"configBlackList", "brokerConfigPath", "rocketmqHome"})
_FREE: Final = {
    "enablePopBufferMerge": "false",
    "enableNotifyAfterPopOrderLockRelease": "true",
    "enableSingleTopicRegister": "false",
    "enableSplitRegistration": "false",
    "estimateAccumulation": "true",
}
"""How RocketMQ does something that the node does in its own way: both values are right."""


class BrokerConfigError(ValueError):
    """A change that the node cannot make."""


class BrokerConfig:
    """The node's settings under RocketMQ's names. ``long_polling`` and ``short_polling_ms`` are for pulls."""

    def __init__(
        self,
        config: NodeConfig,
        root: Path,
        address: str,
        name_servers: list[str],
        template_queues: int,
        *,
        has_trace_topic: bool = False,
    ) -> None:
        self.long_polling, self.short_polling_ms = True, 1_000
        host, _, port = address.rpartition(":")
        network, log = config.network, config.commit_log
        self._texts: dict[str, str] = {
            "brokerClusterName": network.cluster_name,
            "brokerName": network.broker_name,
            "brokerId": "0",
            "brokerRole": "ASYNC_MASTER",
            "brokerIP1": host,
            "listenPort": port,
            "namesrvAddr": ";".join(name_servers),
            "brokerPermission": "6",
            "flushDiskType": "SYNC_FLUSH" if log.flush_mode == "sync" else "ASYNC_FLUSH",
            "storePathRootDir": str(root),
            "mappedFileSizeCommitLog": str(log.segment_bytes),
            "maxMessageSize": str(log.max_message_bytes),
            "transientStorePoolEnable": _text(log.transient_store_pool),
            "autoCreateTopicEnable": _text(config.topics.auto_create),
            "defaultTopicQueueNums": str(template_queues),
            "autoCreateSubscriptionGroup": _text(config.groups.auto_create),
            "enablePropertyFilter": _text(config.filter.sql_enabled),
            "traceTopicEnable": _text(has_trace_topic),
            "msgTraceTopicName": TRACE_TOPIC,
            "traceOn": "true",
            "useTLS": "false",  # (of its connections to other servers)
            "slaveReadEnable": "false",
            "clusterTopicEnable": "true",
            "brokerTopicEnable": "true",
            "regionId": REGION,
            "fileReservedTime": str(config.retention.hours),
            "deleteWhen": config.retention.delete_when,
            "diskMaxUsedSpaceRatio": str(round(config.retention.clean_ratio * 100)),
            "messageDelayLevel": " ".join(_delay(one) for one in DELAY_LEVELS_MS),
            "timerWheelEnable": _text(config.timer.enable),
            "enableLmq": _text(config.consume_queue.enable_lmq),
            "useServerSideResetOffset": "true",
            "enableRetryTopicV2": _text(config.pop.retry_topics_v2),
            "retrieveMessageFromPopRetryTopicV1": _text(config.pop.read_retry_topics_v1),
            "longPollingEnable": "true",
            "shortPollingTimeMills": "1000",
            **_FREE,
        }

    def text(self) -> str:
        """All settings, a line each."""
        return "".join(f"{name}={value}\n" for name, value in sorted(self._texts.items()))

    def change(self, wanted: dict[str, str]) -> None:
        """Raises BrokerConfigError; then nothing was changed."""
        for name, value in wanted.items():
            if name not in self._texts:
                raise BrokerConfigError(f"the node has no setting {name}; see config/node.toml for those it has")
            if name == "shortPollingTimeMills" and not value.isdecimal():
                raise BrokerConfigError(f"{name} must be a number of milliseconds, not {value!r:.100}")
            if (name in _FREE or name == "longPollingEnable") and value not in ("true", "false"):
                raise BrokerConfigError(f"{name} must be true or false, not {value!r:.100}")
            is_free = name in _FREE or name in ("longPollingEnable", "shortPollingTimeMills")
            if not is_free and value != self._texts[name]:
                raise BrokerConfigError(f"{name} cannot change while the node runs: set it in the node's configuration")
        self._texts |= wanted
        self.long_polling = self._texts["longPollingEnable"] == "true"
        self.short_polling_ms = int(self._texts["shortPollingTimeMills"])


def parse_properties(text: str) -> dict[str, str]:
    """The lines of a Java properties text."""
    found = {}
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and stripped[0] not in "#!":
            name, _, value = stripped.partition("=")
            found[name.strip().replace("\\:", ":")] = value.strip().replace("\\:", ":").replace("\\=", "=")
    return found


def _delay(delay_ms: int) -> str:
    """A delay level in RocketMQ's words: ``10s``, ``2h``."""
    for unit, unit_ms in (("h", 3_600_000), ("m", 60_000)):
        if not delay_ms % unit_ms:
            return f"{delay_ms // unit_ms}{unit}"
    return f"{delay_ms // 1_000}s"


def _text(value: bool) -> str:
    return "true" if value else "false"
