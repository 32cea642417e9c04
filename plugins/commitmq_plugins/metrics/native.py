"""The metrics of one answer, made of the node's figures, under three sets of names.

* :class:`MetricsWriter`: CommitMQ's own: positions, lags by queue, processes, and all that the processes counted.
* :class:`Native`: RocketMQ 5's own, so that its boards and alerts work here.
* :class:`Exporter`: those of rocketmq-exporter, at ``/metrics?compat=exporter``. It shows rates that the broker kept. Here
  they are made of two answers, at least ``_LEAST_S`` apart, so the first answer has none.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from commitmq import counting
from commitmq.config import NodeConfig
from commitmq.counting import Kind
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import HALF_TOPIC
from commitmq_plugins.metrics.exposition import EXPORTER, NATIVE, OWN, Exposition, label_text
from commitmq_plugins.metrics.figures import CountedMetric, Figures, GroupLag, Lags, QueueLag

_LEAST_S: Final = 1.0
_EVERY_S: Final = 5.0
_LONGEST_S: Final = 60.0

Key = tuple[str, ...]


class CounterRates:
    """What counters did in the last minute, from one answer to another."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[Key, int]]] = deque()
        self._now: tuple[float, dict[Key, int]] = (0.0, {})

    def sample(self, now_s: float, values: dict[Key, int]) -> None:
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
        self._rates = CounterRates()
        self._boot_ms = time.time_ns() // 1_000_000
        self._topic = {"cluster": network.cluster_name, "broker": network.broker_name}
        self._broker = {"cluster": network.cluster_name, "brokerIP": network.store_host, "broker": network.broker_name}

    def write(self, page: Exposition, figures: Figures, now_s: float) -> None:
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
        for (topic,), count in figures.by_label(counting.MESSAGES_IN.name, "topic").items():
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
        waits = figures.by_label(counting.SENDS_WAITING.name)
        woken = figures.by_label(counting.PULLS_WOKEN.name)
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
    def __init__(self, page: Exposition) -> None:
        self._page = page

    def __call__(self, name: str, value: Any, labels: dict[str, str]) -> None:
        one = EXPORTER[name]
        self._page.put(name, one.kind, one.help, value, label_text(labels))


def _counters(figures: Figures) -> dict[Key, int]:
    """``(in,)``, ``(in, topic)``, ``(out,)``, ``(out, topic, group)``, and the same with bytes."""
    found: dict[Key, int] = {}
    for family, name in ((counting.MESSAGES_IN, "in"), (counting.BYTES_IN, "in_bytes")):
        by_topic = figures.by_label(family.name, "topic")
        found[name,] = sum(by_topic.values())
        found.update({(name, *key): value for key, value in by_topic.items()})
    for family, name in ((counting.MESSAGES_OUT, "out"), (counting.BYTES_OUT, "out_bytes")):
        by_group = figures.by_label(family.name, "topic", "group")
        found[name,] = sum(by_group.values())
        found.update({(name, *key): value for key, value in by_group.items()})
    return found


_SYSTEM_TOPICS: Final = {
    "TBW102", "SCHEDULE_TOPIC_XXXX", "BenchmarkTest", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRACE_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "CHECKPOINT_TOPIC",
}  # fmt: skip
_SYSTEM_TOPIC: Final = "rmq_sys_"
_SYSTEM_GROUP: Final = "cid_rmq_sys_"
_STORE: Final = {"storage_type": "local", "storage_medium": "disk"}
_READ_WRITE, _READ_ONLY = 6, 4
_SUFFIX: Final = "_milliseconds"


def is_system(topic: str, group: str = "") -> bool:
    """As RocketMQ tells its own topics and groups."""
    return topic in _SYSTEM_TOPICS or topic.startswith(_SYSTEM_TOPIC) or group.lower().startswith(_SYSTEM_GROUP)


def message_type(topic: str, attributes: Mapping[str, str]) -> str:
    """What a message of ``topic`` is to RocketMQ's label of that name: by the topic that it was stored in."""
    if topic in (TIMER_TOPIC, SCHEDULE_TOPIC):
        return "delay"
    if topic == HALF_TOPIC:
        return "transaction"
    return "fifo" if attributes.get("message.type") == "FIFO" else "normal"


class Native:
    """Writes one page."""

    def __init__(self, page: Exposition, config: NodeConfig, figures: Figures, *, may_write: bool) -> None:
        network = config.network
        self._page, self._figures, self._may_write = page, figures, may_write
        self._in_flight = figures.by_label(counting.POP_IN_FLIGHT.name, "topic", "group")
        self._popped = {group for _, group in self._in_flight}
        self._members = {name: int(row["members"]) for name, row in (figures.groups or {}).items()}
        self._remote = figures.by_label("rocketmq_consumer_connections", "consumer_group")
        self.node = {"cluster": network.cluster_name, "node_type": "broker", "node_id": network.broker_name}

    def write_node(self) -> None:
        """What has no label of a topic or group; and what a plugin's worker counts so under RocketMQ's names."""
        self._node_figures()
        self._others(of_names=False)

    def write_lag(self, group: str, topic: str, lag: GroupLag) -> None:
        """A group in a topic: RocketMQ shows groups with members only."""
        if not self._members.get(group) and group not in self._popped and not self._remote.get((group,)):
            return
        labels = {
            "consumer_group": group,
            "topic": topic,
            "is_retry": _flag(topic.startswith(RETRY_PREFIX)),
            "is_system": _flag(is_system(topic, group)),
        }
        held = self._in_flight.get((topic, group), 0)
        age = None if lag.messages else 0
        if lag.since_ms is not None:
            age = max(0, self._figures.at_ms - lag.since_ms)
        self._put("rocketmq_consumer_lag_messages", lag.messages + held, **labels)
        self._put("rocketmq_consumer_lag_latency_milliseconds", age, **labels)
        self._put("rocketmq_consumer_ready_messages", lag.messages, **labels)
        self._put("rocketmq_consumer_queueing_latency_milliseconds", age, **labels)
        if group in self._popped:
            self._put("rocketmq_consumer_inflight_messages", held, **labels)

    def write_names(self) -> None:
        """What else there is of groups and topics, without histograms."""
        self._connections()
        self._incoming()
        self._outgoing()
        self._ends()
        self._timers()
        self._others(of_names=True)

    def write_histograms(self) -> None:
        """Histograms by topic or group: the most samples for one name."""
        sizes = self._figures.count(counting.MESSAGE_SIZE.name)
        for values, words in (sizes.rows if sizes is not None else {}).items():
            topic = values[0]
            if not topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
                self._histogram("rocketmq_message_size", sizes, words, self._labels_of(topic))
        times = self._figures.count(counting.TRANSACTION_TIME.name)
        for values, words in (times.rows if times is not None else {}).items():
            self._histogram("rocketmq_finish_message_latency_milliseconds", times, words, {"topic": values[0]})
        self._others(of_names=True, histograms=True)

    def _put(self, name: str, value: float | None, **labels: str) -> None:
        one = NATIVE[name]
        self._page.put(name, one.kind, one.help, value, label_text({**self.node, **labels}))

    def _node_figures(self) -> None:
        figures, words = self._figures, self._figures.words
        self._put("rocketmq_broker_permission", _READ_WRITE if self._may_write else _READ_ONLY)
        self._put("rocketmq_topic_number", None if figures.topics is None else len(figures.topics))
        self._put("rocketmq_consumer_group_number", None if figures.groups is None else len(figures.groups))
        behind = max(0, words["written"] - words["flushed"])
        self._put("rocketmq_storage_size_bytes", figures.disk_used, **_STORE)
        self._put("rocketmq_storage_flush_behind_bytes", behind, **_STORE)
        self._put("rocketmq_storage_dispatch_behind_bytes", max(0, words["written"] - words["dispatched"]), **_STORE)
        age = 0 if figures.oldest_ms is None else max(0, figures.at_ms - figures.oldest_ms)
        self._put("rocketmq_storage_message_reserve_time_milliseconds", age, **_STORE)
        for processor, family in (("send", counting.SENDS_WAITING), ("pull", counting.PULLS_WOKEN)):
            waits = figures.by_label(family.name)
            if waits:
                self._put("rocketmq_processor_watermark", sum(waits.values()), processor=processor)
        open_ones = self._figures.by_label(counting.TRANSACTIONS_OPEN.name)
        if open_ones:
            self._put("rocketmq_half_messages", sum(open_ones.values()), topic=HALF_TOPIC)

    def _connections(self) -> None:
        # RocketMQ's clients are members too; their server counts them by language and version.
        for name, count in self._members.items():
            others = count - self._remote.get((name,), 0)
            if others > 0:
                self._put(
                    "rocketmq_consumer_connections",
                    others,
                    consumer_group=name,
                    language="python",
                    version="",
                    consume_mode="pull",
                    protocol_type="commitmq",
                    is_system=_flag(is_system("", name)),
                )

    def _incoming(self) -> None:
        for family, name in (
            (counting.MESSAGES_IN, "rocketmq_messages_in_total"),
            (counting.BYTES_IN, "rocketmq_throughput_in_total"),
        ):
            for (topic, source), value in self._figures.by_label(family.name, "topic", "source").items():
                if source == "client" and not topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
                    self._put(name, value, **self._labels_of(topic))

    def _labels_of(self, topic: str) -> dict[str, str]:
        attributes = (self._figures.topics or {}).get(topic, {}).get("attributes", {})
        return {
            "topic": topic,
            "message_type": message_type(topic, attributes),
            "is_system": _flag(is_system(topic)),
        }

    def _outgoing(self) -> None:
        for family, name in (
            (counting.MESSAGES_OUT, "rocketmq_messages_out_total"),
            (counting.BYTES_OUT, "rocketmq_throughput_out_total"),
        ):
            found = self._figures.by_label(family.name, "topic", "group", "way")
            for (topic, group, way), value in found.items():
                if not group:
                    continue  # a reader without a group is none to RocketMQ
                labels = {"topic": topic, "consumer_group": group, "is_system": _flag(is_system(topic, group))}
                if way == "pop":
                    labels["is_retry"] = _flag(topic.startswith(RETRY_PREFIX))
                self._put(name, value, **labels)
        for (topic, group), value in self._figures.by_label(counting.DEAD_LETTERS.name, "topic", "group").items():
            labels = {"topic": topic, "consumer_group": group, "is_system": _flag(is_system(topic, group))}
            self._put("rocketmq_send_to_dlq_messages_total", value, **labels)

    def _ends(self) -> None:
        ended = self._figures.by_label(counting.TRANSACTIONS_ENDED.name, "topic", "outcome")
        for (topic, outcome), value in ended.items():
            self._put(f"rocketmq_{outcome}_messages_total", value, topic=topic)

    def _timers(self) -> None:
        for family, name in (
            (counting.DELAYED_WAITING, "rocketmq_timing_messages"),
            (counting.DELAYED_IN, "rocketmq_timer_enqueue_total"),
            (counting.DELAYED_OUT, "rocketmq_timer_dequeue_total"),
        ):
            for (topic,), value in self._figures.by_label(family.name, "topic").items():
                self._put(name, value, **_STORE, topic=topic)

    def _histogram(self, name: str, counted: CountedMetric | None, words: list[int], labels: dict[str, str]) -> None:
        assert counted is not None
        described, text = counted.described, label_text({**self.node, **labels})
        self._page.put_histogram(name, NATIVE[name].help, described.bounds, words, described.scale, text)

    def _others(self, *, of_names: bool, histograms: bool = False) -> None:
        for name, counted in self._figures.counted.items():
            if name.startswith("rocketmq_") and belongs(counted, of_names=of_names, histograms=histograms):
                put_counted(self._page, name, counted, self.node)


def belongs(counted: CountedMetric, *, of_names: bool, histograms: bool) -> bool:
    """Whether ``counted`` is written with this part of a page. Those that are not ``of_names`` come together."""
    if not of_names:
        return not counted.is_of_names
    return counted.is_of_names and (counted.described.kind is Kind.HISTOGRAM) == histograms


def put_counted(page: Exposition, name: str, counted: CountedMetric, more: Mapping[str, str]) -> None:
    """Every row of a metric as it was counted, with ``more`` labels before its own."""
    described = counted.described
    for values, words in counted.rows.items():
        text = label_text({**more, **counted.labels(values)})
        if described.kind is Kind.HISTOGRAM:
            page.put_histogram(name, described.help, described.bounds, words, described.scale, text)
        else:
            page.put(name, described.kind, described.help, words[0] * described.scale, text)


def _flag(value: bool) -> str:
    return "true" if value else "false"


_WORDS: Final = {
    "commitmq_log_written_offset_bytes": "written",
    "commitmq_log_flushed_offset_bytes": "flushed",
    "commitmq_log_visible_offset_bytes": "visible",
    "commitmq_log_reput_offset_bytes": "reput",
    "commitmq_log_allocated_offset_bytes": "allocated",
    "commitmq_log_min_offset_bytes": "min_offset",
}
ALL_TOPICS: Final = "*"


class MetricsWriter:
    """Writes one page."""

    def __init__(self, page: Exposition, config: NodeConfig, figures: Figures, lags: Lags) -> None:
        self._page, self._figures, self._lags = page, figures, lags
        self._settings = config.metrics
        wanted = [name.strip() for name in config.metrics.queue_topics.split(";") if name.strip()]
        self._wants_all = ALL_TOPICS in wanted
        self._wanted = set(wanted)
        worst = sorted(figures.queue_lags, key=lambda one: -one.messages)[: self._settings.top_queues]
        self._worst = [one for one in worst if one.messages]
        self._shown_groups: set[str] = set()

    def write_node(self, *, ready: bool) -> None:
        """What has no label of a topic or group, and the queues that are furthest behind: their number is bounded."""
        figures = self._figures
        self._put("commitmq_build_info", 1, version=metadata.version("commitmq"), python=platform.python_version())
        self._put("commitmq_ready", int(ready))
        self._positions()
        self._disk()
        self._processes()
        self._put("commitmq_log_cuts_total", self._figures.log_cuts)
        self._put("commitmq_positions_lowered_total", self._figures.positions_lowered)
        self._put("commitmq_topics", None if figures.topics is None else len(figures.topics))
        self._put("commitmq_groups", None if figures.groups is None else len(figures.groups))
        self._counted(of_names=False)
        for one in self._worst:
            self._queue_lag(one)

    def write_lag(self, group: str, topic: str, lag: GroupLag) -> None:
        """A group in a topic, and the group's members: alerts compare the two."""
        self._put("commitmq_group_lag_messages", lag.messages, group=group, topic=topic)
        if lag.since_ms is not None or not lag.messages:
            age_s = 0.0 if lag.since_ms is None else max(0, self._figures.at_ms - lag.since_ms) / 1000
            self._put("commitmq_group_lag_seconds", age_s, group=group, topic=topic)
        self._members(group)

    def write_names(self) -> None:
        """What else there is of groups, queues and topics, without histograms."""
        for group in self._figures.groups or {}:
            self._members(group)
        self._queues()
        self._counted(of_names=True)

    def write_histograms(self) -> None:
        """Histograms by topic or group: the most samples for one name."""
        self._counted(of_names=True, histograms=True)

    def write_answer(self, took_s: float, errors: int) -> None:
        """The figures of the answer itself: last, for they say what it lacks."""
        page = self._page
        dropped, left = page.dropped, self._figures.positions_left_out
        page.reserve(4)
        self._put("commitmq_scrape_duration_seconds", took_s)
        self._put("commitmq_scrape_errors_total", errors)
        self._put("commitmq_series_dropped", dropped)
        self._put("commitmq_positions_left_out", left)

    def _put(self, name: str, value: float | None, **labels: str) -> None:
        one = OWN[name]
        self._page.put(name, one.kind, one.help, value, label_text(labels))

    def _positions(self) -> None:
        words = self._figures.words
        for name, word in _WORDS.items():
            self._put(name, words[word])
        self._put("commitmq_flush_lag_bytes", max(0, words["written"] - words["flushed"]))
        self._put("commitmq_dispatch_lag_bytes", max(0, words["written"] - words["dispatched"]))
        for row in self._figures.dispatchers:
            name = str(row["name"])
            self._put("commitmq_dispatcher_position_bytes", row["position"], dispatcher=name)
            self._put("commitmq_dispatcher_durable_offset_bytes", row["durable"], dispatcher=name)
            self._put("commitmq_dispatcher_lag_bytes", row["lag_bytes"], dispatcher=name)
            self._put("commitmq_dispatcher_parked", int(row["state"] == "parked"), dispatcher=name)

    def _disk(self) -> None:
        figures, words = self._figures, self._figures.words
        self._put("commitmq_disk_total_bytes", figures.disk_total)
        self._put("commitmq_disk_used_bytes", figures.disk_used)
        self._put("commitmq_disk_full", int(bool(words["disk_flags"])))
        self._put("commitmq_device_failed", int(bool(words["flush_errno"])))
        self._put("commitmq_segments", figures.segments)
        if figures.oldest_ms is not None:
            age_s = max(0, figures.at_ms - figures.oldest_ms) / 1000
            self._put("commitmq_oldest_message_age_seconds", age_s)

    def _processes(self) -> None:
        for one in self._figures.processes:
            role = one.role
            self._put("commitmq_up", int(one.is_ready), process=role)
            self._put("commitmq_process_cpu_seconds_total", one.cpu_s, process=role)
            self._put("commitmq_process_resident_memory_bytes", one.resident, process=role)
            self._put("commitmq_process_memory_bytes", one.proportional, process=role)
            self._put("commitmq_process_open_fds", one.descriptors, process=role)
            self._put("commitmq_process_restarts_total", one.restarts, process=role)
            self._put("commitmq_process_heartbeat_age_seconds", one.heartbeat_age_s, process=role)

    def _members(self, group: str) -> None:
        row = (self._figures.groups or {}).get(group)
        if row is not None and group not in self._shown_groups:
            self._shown_groups.add(group)
            self._put("commitmq_group_members", row["members"], group=group)

    def _counted(self, *, of_names: bool, histograms: bool = False) -> None:
        for name, counted in self._figures.counted.items():
            if not name.startswith("rocketmq_") and belongs(counted, of_names=of_names, histograms=histograms):
                put_counted(self._page, name, counted, {})

    def _queues(self) -> None:
        figures = self._figures
        shown = {id(one) for one in self._worst}
        for one in figures.queue_lags:
            if id(one) not in shown and self._wants(one.topic):
                self._queue_lag(one)
        for topic, row in (figures.topics or {}).items():
            if not self._wants(topic):
                continue
            for queue in range(int(row["read_queues"])):
                bounds = self._lags.bounds(topic, queue)
                if bounds is not None:
                    self._put("commitmq_queue_min_offset", bounds[0], topic=topic, queue=str(queue))
                    self._put("commitmq_queue_end_offset", bounds[1], topic=topic, queue=str(queue))

    def _queue_lag(self, one: QueueLag) -> None:
        labels = {"group": one.group, "topic": one.topic, "queue": str(one.queue)}
        self._put("commitmq_group_queue_lag_messages", one.messages, **labels)
        if one.since_ms is not None or not one.messages:
            age_s = 0.0 if one.since_ms is None else max(0, self._figures.at_ms - one.since_ms) / 1000
            self._put("commitmq_group_queue_lag_seconds", age_s, **labels)

    def _wants(self, topic: str) -> bool:
        return self._wants_all or topic in self._wanted
