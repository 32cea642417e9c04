"""RocketMQ 5's own metrics, made of the node's figures, so that its boards and alerts work here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from commitmq.config import NodeConfig
from commitmq.counting import families
from commitmq.counting.family import Kind
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import HALF_TOPIC
from commitmq_plugins.metrics.counted import Counted
from commitmq_plugins.metrics.figures import Figures, GroupLag
from commitmq_plugins.metrics.names import NATIVE
from commitmq_plugins.metrics.page import Page, label_text

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

    def __init__(self, page: Page, config: NodeConfig, figures: Figures, *, may_write: bool) -> None:
        network = config.network
        self._page, self._figures, self._may_write = page, figures, may_write
        self._in_flight = figures.by_label(families.POP_IN_FLIGHT.name, "topic", "group")
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
        sizes = self._figures.count(families.MESSAGE_SIZE.name)
        for values, words in (sizes.rows if sizes is not None else {}).items():
            topic = values[0]
            if not topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
                self._histogram("rocketmq_message_size", sizes, words, self._labels_of(topic))
        times = self._figures.count(families.TRANSACTION_TIME.name)
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
        for processor, family in (("send", families.SENDS_WAITING), ("pull", families.PULLS_WOKEN)):
            waits = figures.by_label(family.name)
            if waits:
                self._put("rocketmq_processor_watermark", sum(waits.values()), processor=processor)
        open_ones = self._figures.by_label(families.TRANSACTIONS_OPEN.name)
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
            (families.MESSAGES_IN, "rocketmq_messages_in_total"),
            (families.BYTES_IN, "rocketmq_throughput_in_total"),
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
            (families.MESSAGES_OUT, "rocketmq_messages_out_total"),
            (families.BYTES_OUT, "rocketmq_throughput_out_total"),
        ):
            found = self._figures.by_label(family.name, "topic", "group", "way")
            for (topic, group, way), value in found.items():
                if not group:
                    continue  # a reader without a group is none to RocketMQ
                labels = {"topic": topic, "consumer_group": group, "is_system": _flag(is_system(topic, group))}
                if way == "pop":
                    labels["is_retry"] = _flag(topic.startswith(RETRY_PREFIX))
                self._put(name, value, **labels)
        for (topic, group), value in self._figures.by_label(families.DEAD_LETTERS.name, "topic", "group").items():
            labels = {"topic": topic, "consumer_group": group, "is_system": _flag(is_system(topic, group))}
            self._put("rocketmq_send_to_dlq_messages_total", value, **labels)

    def _ends(self) -> None:
        ended = self._figures.by_label(families.TRANSACTIONS_ENDED.name, "topic", "outcome")
        for (topic, outcome), value in ended.items():
            self._put(f"rocketmq_{outcome}_messages_total", value, topic=topic)

    def _timers(self) -> None:
        for family, name in (
            (families.DELAYED_WAITING, "rocketmq_timing_messages"),
            (families.DELAYED_IN, "rocketmq_timer_enqueue_total"),
            (families.DELAYED_OUT, "rocketmq_timer_dequeue_total"),
        ):
            for (topic,), value in self._figures.by_label(family.name, "topic").items():
                self._put(name, value, **_STORE, topic=topic)

    def _histogram(self, name: str, counted: Counted | None, words: list[int], labels: dict[str, str]) -> None:
        assert counted is not None
        described, text = counted.described, label_text({**self.node, **labels})
        self._page.put_histogram(name, NATIVE[name].help, described.bounds, words, described.scale, text)

    def _others(self, *, of_names: bool, histograms: bool = False) -> None:
        for name, counted in self._figures.counted.items():
            if name.startswith("rocketmq_") and belongs(counted, of_names=of_names, histograms=histograms):
                put_counted(self._page, name, counted, self.node)


def belongs(counted: Counted, *, of_names: bool, histograms: bool) -> bool:
    """Whether ``counted`` is written with this part of a page. Those that are not ``of_names`` come together."""
    if not of_names:
        return not counted.is_of_names
    return counted.is_of_names and (counted.described.kind is Kind.HISTOGRAM) == histograms


def put_counted(page: Page, name: str, counted: Counted, more: Mapping[str, str]) -> None:
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
