"""The metrics that this process makes itself: name, kind, labels, and what each means; and the text of an answer to a scrape.

``docs/metrics.md`` has them too: ``python -m commitmq_plugins.metrics.exposition`` writes the tables of the page. Those that
the node's processes count are in :mod:`commitmq.counting`. Names that begin with ``rocketmq_`` are RocketMQ 5's, with
its labels; those of EXPORTER are rocketmq-exporter's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from commitmq import counting
from commitmq.counting import Family, Kind

NODE_LABELS: Final = ("cluster", "node_type", "node_id")
"""All native metrics have these labels first."""
_SETS: Final = {
    "STORE": "storage_type,storage_medium",
    "LAG": "consumer_group,topic,is_retry,is_system",
    "CLUSTER": "cluster,brokerIP,broker",
    "TOPIC": "cluster,broker,topic",
    "READ": "cluster,broker,topic,group",
    "DIFF": "group,topic,countOfOnlineConsumers,msgModel",
    "RUNTIME": "cluster,brokerIP,brokerHost,des,boottime,broker_version",
}


class Name(NamedTuple):
    """One metric."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


def _names(text: str) -> Iterator[Name]:
    """Two lines for each: kind, name and labels, where a word in capitals is a set of labels; then the meaning."""
    lines = text.strip().split("\n")
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        kind, name, *labels = first.split(" ")
        shown = [_SETS.get(label, label) for label in "".join(labels).split(",") if label]
        yield Name(name, Kind(kind), tuple(",".join(shown).split(",")) if shown else (), second.strip())


def _table(text: str) -> dict[str, Name]:
    return {one.name: one for one in _names(text)}


NATIVE: Final = _table("""
counter rocketmq_messages_in_total topic,message_type,is_system
    Messages that clients stored; not in retry topics and dead letters.
counter rocketmq_throughput_in_total topic,message_type,is_system
    Bytes of the records of these messages.
histogram rocketmq_message_size topic,message_type,is_system
    Size of a record in bytes; of a batch its mean, once.
counter rocketmq_messages_out_total topic,consumer_group,is_system,is_retry
    Messages that groups got, by pull or POP. A pull has no is_retry.
counter rocketmq_throughput_out_total topic,consumer_group,is_system,is_retry
    Bytes of the records of these messages.
gauge rocketmq_processor_watermark processor
    Requests that wait: sends for the device, pulls for their turn.
gauge rocketmq_broker_permission
    6 to read and write, 4 to read only.
gauge rocketmq_topic_number
    Topics, those of the system included.
gauge rocketmq_consumer_group_number
    Consumer groups.
gauge rocketmq_consumer_connections consumer_group,language,version,consume_mode,protocol_type,is_system
    Members of consumer groups.
gauge rocketmq_consumer_lag_messages LAG
    Messages that a group with members has not acknowledged.
gauge rocketmq_consumer_lag_latency_milliseconds LAG
    Age of the oldest of them; 0 without one.
gauge rocketmq_consumer_inflight_messages LAG
    Messages that consumers which share queues have received and not acknowledged.
gauge rocketmq_consumer_queueing_latency_milliseconds LAG
    Age of the oldest message that was not delivered; 0 without one.
gauge rocketmq_consumer_ready_messages LAG
    Messages that were not delivered. For groups that pull: not committed.
counter rocketmq_send_to_dlq_messages_total topic,consumer_group,is_system
    Messages that consumers sent back once too often.
gauge rocketmq_half_messages topic
    Transactions without an end, all together: the topic is that of half messages.
counter rocketmq_commit_messages_total topic
    Transactions that were committed.
counter rocketmq_rollback_messages_total topic
    Transactions that were rolled back.
histogram rocketmq_finish_message_latency_milliseconds topic
    Time from birth to commit in SECONDS, in spite of the name, as in RocketMQ.
gauge rocketmq_storage_size_bytes STORE
    Used space of the file system of the store.
gauge rocketmq_storage_flush_behind_bytes STORE
    Bytes of the log that are not on the device yet.
gauge rocketmq_storage_dispatch_behind_bytes STORE
    Bytes of the log that are not in the ConsumeQueues yet.
gauge rocketmq_storage_message_reserve_time_milliseconds STORE
    Age of the oldest message.
gauge rocketmq_timing_messages STORE,topic
    Messages that wait for a time of their own.
counter rocketmq_timer_enqueue_total STORE,topic
    Messages that the timer took in.
counter rocketmq_timer_dequeue_total STORE,topic
    Messages of the timer that are done.
""")

OWN: Final = _table("""
gauge commitmq_build_info version,python
    1; the versions are in the labels.
gauge commitmq_up process
    1 for a process that is ready.
gauge commitmq_ready
    1 when the node takes and gives messages, as /health/ready says.
gauge commitmq_log_written_offset_bytes
    End of the log.
gauge commitmq_log_flushed_offset_bytes
    Everything below is on the device.
gauge commitmq_log_visible_offset_bytes
    Everything below may be read.
gauge commitmq_log_reput_offset_bytes
    Everything below was passed to the dispatchers.
gauge commitmq_log_allocated_offset_bytes
    End of the last segment that is ready.
gauge commitmq_log_min_offset_bytes
    Beginning of the log.
gauge commitmq_flush_lag_bytes
    Bytes of the log that are not on the device yet.
gauge commitmq_dispatch_lag_bytes
    Bytes of the log that are not in the ConsumeQueues yet.
gauge commitmq_dispatcher_position_bytes dispatcher
    Position of a dispatcher in the log.
gauge commitmq_dispatcher_durable_offset_bytes dispatcher
    Position up to which its files survive a power cut.
gauge commitmq_dispatcher_lag_bytes dispatcher
    How far a dispatcher is behind reput.
gauge commitmq_dispatcher_parked dispatcher
    1 for a dispatcher that waits for an operator.
gauge commitmq_group_lag_messages group,topic
    Messages that a group has not read, whether it has members or not.
gauge commitmq_group_lag_seconds group,topic
    Age of the oldest of them; 0 without one.
gauge commitmq_group_queue_lag_messages group,topic,queue
    The same for one queue: of metrics.queue_topics, and the worst ones.
gauge commitmq_group_queue_lag_seconds group,topic,queue
    The same in time.
gauge commitmq_group_members group
    Members of a group.
gauge commitmq_queue_end_offset topic,queue
    Offset of the next message of a queue of metrics.queue_topics.
gauge commitmq_queue_min_offset topic,queue
    Offset of its first message.
counter commitmq_log_cuts_total
    Starts after which the log may have ended earlier than before: a power cut, a repair, a copied store, a first use.
counter commitmq_positions_lowered_total
    Committed offsets that lay behind the end of such a log, and were lowered to it.
gauge commitmq_topics
    Topics.
gauge commitmq_groups
    Consumer groups.
counter commitmq_process_cpu_seconds_total process
    Processor time of a process and of those before it.
gauge commitmq_process_resident_memory_bytes process
    Memory of a process, with all that it maps.
gauge commitmq_process_memory_bytes process
    Memory of a process, with its share of what several map; without files of the store. A quarter of a minute old at most.
gauge commitmq_process_open_fds process
    Descriptors.
counter commitmq_process_restarts_total process
    How often it was started again.
gauge commitmq_process_heartbeat_age_seconds process
    Since its loop turned last.
gauge commitmq_disk_total_bytes
    Size of the file system of the store.
gauge commitmq_disk_used_bytes
    Used space of it.
gauge commitmq_disk_full
    1 while sends are refused because of the disk.
gauge commitmq_device_failed
    1 after a failed sync: the store is read-only.
gauge commitmq_segments
    Segment files of the log.
gauge commitmq_oldest_message_age_seconds
    Age of the oldest message.
gauge commitmq_scrape_duration_seconds
    Time that it took to gather this answer.
counter commitmq_scrape_errors_total
    Figures that no process gave in time.
gauge commitmq_series_dropped
    Series that this answer leaves out because of metrics.max_series.
gauge commitmq_positions_left_out
    1 or more when groups have more queues than metrics.max_positions: lags are incomplete.
""")

EXPORTER: Final = _table("""
gauge rocketmq_broker_tps CLUSTER
    Messages stored in a second.
gauge rocketmq_broker_qps CLUSTER
    Messages read in a second.
gauge rocketmq_producer_tps TOPIC
    Messages stored in a second.
gauge rocketmq_producer_message_size TOPIC
    Bytes stored in a second.
gauge rocketmq_producer_offset TOPIC
    Messages of a topic: the sum of the ends of its queues that groups read.
gauge rocketmq_consumer_tps READ
    Messages read in a second.
gauge rocketmq_consumer_message_size READ
    Bytes read in a second.
gauge rocketmq_consumer_offset READ
    Messages that a group has read: the sum of its offsets.
gauge rocketmq_group_get_latency_by_storetime READ
    Age in milliseconds of the oldest message that waits.
gauge rocketmq_group_diff DIFF
    Messages that a group has not read.
gauge rocketmq_group_retrydiff DIFF
    Messages that a group has not read of its retry topic.
gauge rocketmq_group_dlqdiff DIFF
    Dead letters of a group.
gauge rocketmq_topic_retry_offset TOPIC
    Messages of a retry topic.
gauge rocketmq_topic_dlq_offset cluster,broker,group
    Dead letters of a group.
gauge rocketmq_brokeruntime_put_tps10 RUNTIME
    Messages stored in a second.
gauge rocketmq_brokeruntime_getfound_tps10 RUNTIME
    Messages read in a second.
gauge rocketmq_brokeruntime_gettransfered_tps10 RUNTIME
    Messages read in a second.
gauge rocketmq_brokeruntime_commitlog_minoffset RUNTIME
    Beginning of the log.
gauge rocketmq_brokeruntime_commitlog_maxoffset RUNTIME
    End of the log.
gauge rocketmq_brokeruntime_commitlog_disk_ratio RUNTIME
    Used share of the disk.
gauge rocketmq_brokeruntime_consumequeue_disk_ratio RUNTIME
    The same disk.
gauge rocketmq_brokeruntime_commitlogdir_capacity_total RUNTIME
    Bytes of the disk.
gauge rocketmq_brokeruntime_commitlogdir_capacity_free RUNTIME
    Free bytes of it.
gauge rocketmq_brokeruntime_dispatch_behind_bytes RUNTIME
    Bytes that are not in the ConsumeQueues yet.
gauge rocketmq_brokeruntime_remain_howmanydata_toflush RUNTIME
    Bytes that are not on the device yet.
gauge rocketmq_brokeruntime_earliest_message_timestamp RUNTIME
    When the oldest message was stored, in milliseconds.
gauge rocketmq_brokeruntime_msg_put_total_today_now RUNTIME
    Messages stored since the start.
gauge rocketmq_brokeruntime_msg_gettotal_today_now RUNTIME
    Messages read since the start.
gauge rocketmq_brokeruntime_put_message_average_size RUNTIME
    Mean size of a record.
gauge rocketmq_brokeruntime_put_message_size_total RUNTIME
    Bytes stored since the start.
gauge rocketmq_brokeruntime_putmessage_times_total RUNTIME
    Messages stored since the start.
gauge rocketmq_brokeruntime_send_threadpool_queue_size RUNTIME
    Sends that wait for the device.
gauge rocketmq_brokeruntime_pull_threadpoolqueue_size RUNTIME
    Pulls that wait for their turn.
""")

COUNTED: Final = {
    one.name: Name(one.name, one.kind, one.labels, one.help)
    for one in vars(counting).values()
    if isinstance(one, Family)
}
"""What the node's processes count."""

_HEADINGS: Final = (
    ("CommitMQ's names", OWN | COUNTED),
    ("RocketMQ 5's names", NATIVE),
    ("rocketmq-exporter's names", EXPORTER),
)


def tables() -> str:
    """The tables of docs/metrics.md."""
    parts = []
    for heading, names in _HEADINGS:
        parts.append(f"## {heading}\n\n| Name | Kind | Labels | Meaning |\n|---|---|---|---|\n")
        for one in names.values():
            labels = ", ".join(f"`{label}`" for label in one.labels)
            parts.append(f"| `{one.name}` | {one.kind} | {labels} | {one.help} |\n")
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
_HELP_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n"})
_TOTAL: Final = "_total"


def label_text(labels: Mapping[str, str]) -> str:
    """``a="1",b="2"``, without braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())


def number(value: float) -> str:
    """As both formats write a value: whole numbers without a point."""
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return str(int(value))
    return repr(float(value))


@dataclass(slots=True)
class _Metric:
    kind: Kind
    help: str
    lines: list[str] = field(default_factory=list)


class Exposition:
    """One answer to a scrape: metrics with their samples, as Prometheus text and as OpenMetrics.

    Beyond ``max_series`` samples further ones are omitted, and ``dropped`` counts them.

        The samples of a metric come together, whatever the order of the calls; those of a later metric are omitted
        first.
    """

    def __init__(self, max_series: int) -> None:
        self._left = max_series
        self.dropped = 0
        self._metrics: dict[str, _Metric] = {}

    @property
    def names(self) -> list[str]:
        """Names of the metrics that have samples."""
        return [name for name, metric in self._metrics.items() if metric.lines]

    def reserve(self, count: int) -> None:
        """Let so many further samples in, whatever was omitted before."""
        self._left = max(self._left, count)

    def put(self, name: str, kind: Kind, text: str, value: float | None, labels: str = "") -> None:
        """One sample of a counter or gauge. ``labels`` is a :func:`label_text`; a value of None is not known, so absent."""
        if value is None:
            return
        if self._left <= 0:
            self.dropped += 1
            return
        self._left -= 1
        shown = f"{name}{{{labels}}}" if labels else name
        self._metric(name, kind, text).lines.append(f"{shown} {number(value)}\n")

    def put_histogram(
        self, name: str, text: str, bounds: Iterable[float], values: list[int], scale: float, labels: str = ""
    ) -> None:
        """One histogram. ``values``: count, sum, then the observations of each bucket, +Inf last."""
        if self._left < len(values):
            self.dropped += len(values)
            return
        self._left -= len(values)
        total, behind = 0, f",{labels}" if labels else ""
        lines = self._metric(name, Kind.HISTOGRAM, text).lines
        for bound, count in zip([*map(float, bounds), float("inf")], values[2:], strict=True):
            total += count
            shown = "+Inf" if bound == float("inf") else repr(bound)
            lines.append(f'{name}_bucket{{le="{shown}"{behind}}} {total}\n')
        braces = f"{{{labels}}}" if labels else ""
        # The buckets may be a moment ahead of the count: +Inf must be equal to it.
        lines.append(f"{name}_sum{braces} {number(values[1] * scale)}\n")
        lines.append(f"{name}_count{braces} {total}\n")

    def _metric(self, name: str, kind: Kind, text: str) -> _Metric:
        found = self._metrics.get(name)
        if found is None:
            found = self._metrics[name] = _Metric(kind, text)
        return found

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return self._written(openmetrics=False).encode()

    def openmetrics(self) -> bytes:
        return (self._written(openmetrics=True) + "# EOF\n").encode()

    def _written(self, *, openmetrics: bool) -> str:
        parts = []
        for name, metric in self._metrics.items():
            shown = name.removesuffix(_TOTAL) if openmetrics and metric.kind is Kind.COUNTER else name
            help_text = metric.help.translate(_ESCAPES if openmetrics else _HELP_ESCAPES)
            parts.append(f"# HELP {shown} {help_text}\n# TYPE {shown} {metric.kind}\n")
            parts += metric.lines
        return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(tables())
