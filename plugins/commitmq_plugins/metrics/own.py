"""The metrics under CommitMQ's names: positions, queue-level lags, processes, and all that the processes counted."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Final

from commitmq.config import NodeConfig
from commitmq_plugins.metrics.figures import Figures, GroupLag
from commitmq_plugins.metrics.lags import Lags, QueueLag
from commitmq_plugins.metrics.names import OWN
from commitmq_plugins.metrics.native import belongs, put_counted
from commitmq_plugins.metrics.page import Page, label_text

_WORDS: Final = {
    "commitmq_log_written_offset_bytes": "written",
    "commitmq_log_flushed_offset_bytes": "flushed",
    "commitmq_log_visible_offset_bytes": "visible",
    "commitmq_log_reput_offset_bytes": "reput",
    "commitmq_log_allocated_offset_bytes": "allocated",
    "commitmq_log_min_offset_bytes": "min_offset",
}
ALL_TOPICS: Final = "*"


class Own:
    """Writes one page."""

    def __init__(self, page: Page, config: NodeConfig, figures: Figures, lags: Lags) -> None:
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
