"""The metrics of rocketmq-exporter, for boards and alerts that were made for it: ``/metrics?compat=exporter``.

rocketmq-exporter shows rates that the broker kept. Here they are made of two answers, at least ``_LEAST_S`` apart: the first
answer has none.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from commitmq.config import NodeConfig
from commitmq.counting import families
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq_plugins.metrics.figures import Figures
from commitmq_plugins.metrics.names import EXPORTER
from commitmq_plugins.metrics.page import Page, label_text

_LEAST_S: Final = 1.0
_EVERY_S: Final = 5.0
_LONGEST_S: Final = 60.0

Key = tuple[str, ...]


class Rates:
    """What counters did in the last minute, from one answer to another."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[Key, int]]] = deque()
        self._now: tuple[float, dict[Key, int]] = (0.0, {})

    def sample(self, now_s: float, values: dict[Key, int]) -> None:
        """The counters at this moment."""
        while self._samples and now_s - self._samples[0][0] > _LONGEST_S:
            self._samples.popleft()
        self._now = now_s, values
        if not self._samples or now_s - self._samples[-1][0] >= _EVERY_S:
            self._samples.append(self._now)

    def of(self, key: Key) -> float | None:
        """A second; None while it is not known."""
        now_s, values = self._now
        for at_s, former in self._samples:
            if now_s - at_s >= _LEAST_S:
                return max(0, values.get(key, 0) - former.get(key, 0)) / (now_s - at_s)
        return None


class Exporter:
    """Writes pages, and keeps what their rates need."""

    def __init__(self, config: NodeConfig) -> None:
        network = config.network
        self._settings = network
        self._rates = Rates()
        self._boot_ms = time.time_ns() // 1_000_000
        self._topic = {"cluster": network.cluster_name, "broker": network.broker_name}
        self._broker = {"cluster": network.cluster_name, "brokerIP": network.store_host, "broker": network.broker_name}

    def write(self, page: Page, figures: Figures, now_s: float) -> None:
        """All of EXPORTER."""
        counters = _counters(figures)
        self._rates.sample(now_s, counters)
        put = _Putter(page)
        put("rocketmq_broker_tps", self._rates.of(("in",)), self._broker)
        put("rocketmq_broker_qps", self._rates.of(("out",)), self._broker)
        self._runtime(put, counters, figures)
        self._groups(put, counters, figures)
        self._topics(put, counters, figures)

    def _topics(self, put: _Putter, counters: dict[Key, int], figures: Figures) -> None:
        ends: dict[str, dict[int, int]] = {}
        for one in figures.queue_lags:
            ends.setdefault(one.topic, {})[one.queue] = one.end
        for topic, queues in ends.items():
            total, labels = sum(queues.values()), {**self._topic, "topic": topic}
            if topic.startswith(RETRY_PREFIX):
                put("rocketmq_topic_retry_offset", total, labels)
            elif topic.startswith(DLQ_PREFIX):
                put("rocketmq_topic_dlq_offset", total, {**self._topic, "group": topic.removeprefix(DLQ_PREFIX)})
            else:
                put("rocketmq_producer_offset", total, labels)
        for key in counters:
            if key[0] == "in" and len(key) == 2 and not key[1].startswith((RETRY_PREFIX, DLQ_PREFIX)):
                labels = {**self._topic, "topic": key[1]}
                put("rocketmq_producer_tps", self._rates.of(key), labels)
                put("rocketmq_producer_message_size", self._rates.of(("in_bytes", key[1])), labels)

    def _groups(self, put: _Putter, counters: dict[Key, int], figures: Figures) -> None:
        for group, topic, lag in figures.furthest_behind():
            labels = {**self._topic, "topic": topic, "group": group}
            put("rocketmq_consumer_offset", lag.offset, labels)
            age = None if lag.messages else 0
            if lag.since_ms is not None:
                age = max(0, figures.at_ms - lag.since_ms)
            put("rocketmq_group_get_latency_by_storetime", age, labels)
            members = int((figures.groups or {}).get(group, {}).get("members", 0))
            shown = {"group": group, "topic": topic, "countOfOnlineConsumers": str(members), "msgModel": "1"}
            is_retry = topic.startswith(RETRY_PREFIX)
            put("rocketmq_group_retrydiff" if is_retry else "rocketmq_group_diff", lag.messages, shown)
        for (topic,), count in figures.by_label(families.MESSAGES_IN.name, "topic").items():
            if topic.startswith(DLQ_PREFIX):
                group = topic.removeprefix(DLQ_PREFIX)
                shown = {"group": group, "topic": topic, "countOfOnlineConsumers": "0", "msgModel": "1"}
                put("rocketmq_group_dlqdiff", count, shown)
        for key in counters:
            if key[0] == "out" and len(key) == 3 and key[2]:
                labels = {**self._topic, "topic": key[1], "group": key[2]}
                put("rocketmq_consumer_tps", self._rates.of(key), labels)
                put("rocketmq_consumer_message_size", self._rates.of(("out_bytes", *key[1:])), labels)

    def _runtime(self, put: _Putter, counters: dict[Key, int], figures: Figures) -> None:
        words, total, used = figures.words, figures.disk_total, figures.disk_used
        ratio = None if not total or used is None else used / total
        stored, size = counters.get(("in",), 0), counters.get(("in_bytes",), 0)
        waits = figures.by_label(families.SENDS_WAITING.name)
        woken = figures.by_label(families.PULLS_WOKEN.name)
        found = self._rates.of(("out",))
        values: dict[str, float | None] = {
            "put_tps10": self._rates.of(("in",)),
            "getfound_tps10": found,
            "gettransfered_tps10": found,
            "commitlog_minoffset": words["min_offset"],
            "commitlog_maxoffset": words["written"],
            "commitlog_disk_ratio": ratio,
            "consumequeue_disk_ratio": ratio,
            "commitlogdir_capacity_total": total,
            "commitlogdir_capacity_free": None if total is None or used is None else total - used,
            "dispatch_behind_bytes": max(0, words["written"] - words["dispatched"]),
            "remain_howmanydata_toflush": max(0, words["written"] - words["flushed"]),
            "earliest_message_timestamp": figures.oldest_ms,
            "msg_put_total_today_now": stored,
            "msg_gettotal_today_now": counters.get(("out",), 0),
            "put_message_average_size": size / stored if stored else 0,
            "put_message_size_total": size,
            "putmessage_times_total": stored,
            "send_threadpool_queue_size": sum(waits.values()) if waits else None,
            "pull_threadpoolqueue_size": sum(woken.values()) if woken else None,
        }
        network = self._settings
        labels = {
            "cluster": network.cluster_name,
            "brokerIP": network.store_host,
            "brokerHost": f"{network.store_host}:{network.store_port}",
            "des": "V5_4_0",
            "boottime": str(self._boot_ms),
            "broker_version": "493",
        }
        for name, value in values.items():
            put(f"rocketmq_brokeruntime_{name}", value, labels)


class _Putter:
    def __init__(self, page: Page) -> None:
        self._page = page

    def __call__(self, name: str, value: Any, labels: dict[str, str]) -> None:
        one = EXPORTER[name]
        self._page.put(name, one.kind, one.help, value, label_text(labels))


def _counters(figures: Figures) -> dict[Key, int]:
    """``(in,)``, ``(in, topic)``, ``(out,)``, ``(out, topic, group)``, and the same with bytes."""
    found: dict[Key, int] = {}
    for family, name in ((families.MESSAGES_IN, "in"), (families.BYTES_IN, "in_bytes")):
        by_topic = figures.by_label(family.name, "topic")
        found[name,] = sum(by_topic.values())
        found.update({(name, *key): value for key, value in by_topic.items()})
    for family, name in ((families.MESSAGES_OUT, "out"), (families.BYTES_OUT, "out_bytes")):
        by_group = figures.by_label(family.name, "topic", "group")
        found[name,] = sum(by_group.values())
        found.update({(name, *key): value for key, value in by_group.items()})
    return found
