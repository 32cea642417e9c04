"""The server's counts: what sends and pulls add to the statistics, and request 315 (remoting 1.10)."""

from __future__ import annotations

import asyncio
import time

from commitmq_plugins.rocketmq.broker.statistics import SAMPLE_S, Statistics
from commitmq_plugins.rocketmq.remoting.bodies.stats import StatsItem, broker_stats_data
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.headers.topics import ViewBrokerStatsDataRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler


class Counting:
    """See the module. Broker-wide counts have the cluster's name as their key."""

    def __init__(self, cluster_name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.statistics = Statistics()
        self._cluster_name, self._loop = cluster_name, loop
        self._timer = loop.call_later(SAMPLE_S, self._sample)
        self.handlers: dict[RequestCode, Handler] = {RequestCode.VIEW_BROKER_STATS_DATA: self.view}

    def close(self) -> None:
        self._timer.cancel()

    def _sample(self) -> None:
        self.statistics.sample(time.monotonic())
        self._timer = self._loop.call_later(SAMPLE_S, self._sample)

    def stored(self, topic: str, messages: int, size: int) -> None:
        """Messages of ``size`` bytes in all were stored in ``topic``."""
        now, add = time.monotonic(), self.statistics.add
        add("TOPIC_PUT_NUMS", topic, messages, now)
        add("TOPIC_PUT_SIZE", topic, size, now)
        add("BROKER_PUT_NUMS", self._cluster_name, messages, now)
        add("BROKER_PUT_SIZE", self._cluster_name, size, now)

    def read(self, group: str, topic: str, messages: int, size: int) -> None:
        """A group got messages of ``size`` bytes in all."""
        now, add, key = time.monotonic(), self.statistics.add, f"{topic}@{group}"
        add("GROUP_GET_NUMS", key, messages, now)
        add("GROUP_GET_SIZE", key, size, now)
        add("BROKER_GET_NUMS", self._cluster_name, messages, now)

    def missed(self) -> None:
        """A pull found nothing."""
        self.statistics.add("BROKER_GET_MISS", self._cluster_name, 1, time.monotonic())

    def sent_back(self, group: str, topic: str) -> None:
        """A consumer could not handle a message."""
        self.statistics.add("SNDBCK_PUT_NUMS", f"{topic}@{group}", 1, time.monotonic())

    def broker(self, name: str) -> StatsItem:
        """A broker-wide count of the last minute."""
        found = self.statistics.figures(name, self._cluster_name, time.monotonic())
        return StatsItem() if found is None else found[0]

    def broker_total(self, name: str) -> int:
        return self.statistics.total(name, self._cluster_name)

    def view(self, connection: Connection, command: Command) -> Command:
        """Request 315."""
        header = ViewBrokerStatsDataRequestHeader.decode(command.ext_fields)
        found = self.statistics.figures(header.stats_name, header.stats_key, time.monotonic())
        if found is None:
            remark = f"The stats <{header.stats_name}> <{header.stats_key}> not exist"
            return command.answer(ResponseCode.SYSTEM_ERROR, remark)
        return command.answer(body=broker_stats_data(*found))
