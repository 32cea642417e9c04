"""The server's counts: what sends, pulls, pops and acks add to the statistics, and request 315 (remoting 1.10)."""

from __future__ import annotations

import asyncio
import time
from datetime import date
from typing import Final

from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.retry import retry_topic
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import HALF_TOPIC
from commitmq_plugins.rocketmq.broker.put_times import PutTimes
from commitmq_plugins.rocketmq.broker.statistics import SAMPLE_S, Statistics
from commitmq_plugins.rocketmq.broker.system_topics import is_system_topic
from commitmq_plugins.rocketmq.remoting.bodies.stats import StatsItem, broker_stats_data
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.headers.topics import ViewBrokerStatsDataRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_USERS: Final = "_WITHOUT_SYSTEM_TOPIC"
"""The counts whose names end so leave out the topics of the broker itself."""


class Counting:
    """See the module. Broker-wide counts have the cluster's name as their key."""

    def __init__(self, cluster_name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.statistics = Statistics()
        self.puts = PutTimes(time.monotonic())
        self._cluster_name, self._loop = cluster_name, loop
        self._timer = loop.call_later(SAMPLE_S, self._sample)
        self._day = date.today()
        self._mornings = [(0, 0), (0, 0)]
        self.handlers: dict[RequestCode, Handler] = {RequestCode.VIEW_BROKER_STATS_DATA: self.view}

    def close(self) -> None:
        self._timer.cancel()

    def _sample(self) -> None:
        self.statistics.sample(time.monotonic())
        today = date.today()
        if today != self._day:
            self._day = today
            self._mornings = [self._mornings[1], self.now()]
        self._timer = self._loop.call_later(SAMPLE_S, self._sample)

    # ------------------------------------------------------------ events

    def stored(self, topic: str, messages: int, size: int, requests: int = 1) -> None:
        """Messages of ``size`` bytes in all, of so many requests, were stored in ``topic``."""
        now, add = time.monotonic(), self.statistics.add
        add("TOPIC_PUT_NUMS", topic, messages, now, requests)
        add("TOPIC_PUT_SIZE", topic, size, now, requests)
        add("BROKER_PUT_NUMS", self._cluster_name, messages, now, 0)
        add("BROKER_PUT_SIZE", self._cluster_name, size, now, 0)
        if not is_system_topic(topic):
            add(f"BROKER_PUT_NUMS{_USERS}", self._cluster_name, messages, now, 0)

    def read(self, group: str, topic: str, messages: int, size: int) -> None:
        """A group got messages of ``size`` bytes in all."""
        now, add, key = time.monotonic(), self.statistics.add, f"{topic}@{group}"
        add("GROUP_GET_NUMS", key, messages, now)
        add("GROUP_GET_SIZE", key, size, now)
        add("BROKER_GET_NUMS", self._cluster_name, messages, now, 0)
        if not is_system_topic(topic):
            add(f"BROKER_GET_NUMS{_USERS}", self._cluster_name, messages, now, 0)

    def missed(self) -> None:
        """A pull found nothing."""
        self.statistics.add("BROKER_GET_MISS", self._cluster_name, 1, time.monotonic())

    def popped(self, group: str, topic: str) -> None:
        """A group has one more set of messages that it has to acknowledge: a check point."""
        now = time.monotonic()
        self.statistics.add("GROUP_CK_NUMS", f"{topic}@{group}", 1, now)
        self.statistics.add("BROKER_CK_NUMS", self._cluster_name, 1, now, 0)

    def acked(self, group: str, topic: str, messages: int = 1) -> None:
        """A group acknowledged messages that it had popped, or gave them a new time."""
        now = time.monotonic()
        self.statistics.add("GROUP_ACK_NUMS", f"{topic}@{group}", messages, now)
        self.statistics.add("BROKER_ACK_NUMS", self._cluster_name, messages, now, 0)

    def sent_back(self, group: str, topic: str, size: int, dead_of: str | None) -> None:
        """A consumer could not handle a message of ``topic``, of ``size`` bytes. ``dead_of``: the topic that the consumer
        names, for the last try.

        RocketMQ counts a message that waits for its next try in the topic of delays alone, and in the retry topic when it
        comes there; here it counts in both at once. The key of a dead letter begins with the owner of an account, null.
        """
        now, add = time.monotonic(), self.statistics.add
        add("SNDBCK_PUT_NUMS", f"{topic}@{group}", 1, now)
        if dead_of is not None:
            add("SNDBCK2DLQ_TIMES", f"null@{dead_of}@{group}@SEND_BACK_TO_DLQ", 1, now)
            return
        add("TOPIC_PUT_NUMS", SCHEDULE_TOPIC, 1, now)
        add("TOPIC_PUT_SIZE", SCHEDULE_TOPIC, size, now)
        self.stored(retry_topic(group), 1, size)

    # ------------------------------------------------------------ figures

    def rate(self, name: str, key: str) -> float:
        """Of the last minute, per second; 0 for what was never counted."""
        found = self.statistics.figures(name, key, time.monotonic())
        return 0.0 if found is None else found[0].tps

    def broker(self, name: str) -> StatsItem:
        """A broker-wide count of the last minute."""
        found = self.statistics.figures(name, self._cluster_name, time.monotonic())
        return StatsItem() if found is None else found[0]

    def broker_total(self, name: str) -> int:
        return self.statistics.total(name, self._cluster_name)

    def now(self) -> tuple[int, int]:
        """Messages that users sent and got since the process began."""
        return self.broker_total(f"BROKER_PUT_NUMS{_USERS}"), self.broker_total(f"BROKER_GET_NUMS{_USERS}")

    def mornings(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What :meth:`now` was when yesterday began, and when today began."""
        return self._mornings[0], self._mornings[1]

    def view(self, connection: Connection, command: Command) -> Command:
        """Request 315."""
        header = ViewBrokerStatsDataRequestHeader.decode(command.ext_fields)
        found = self.statistics.figures(header.stats_name, header.stats_key, time.monotonic())
        if found is None:
            remark = f"The stats <{header.stats_name}> <{header.stats_key}> not exist"
            return command.answer(ResponseCode.SYSTEM_ERROR, remark)
        return command.answer(body=broker_stats_data(*found))


def counted_topics(topic: str, properties: dict[str, str]) -> tuple[str, ...]:
    """The topics in whose statistics a message counts that waits somewhere first.

    RocketMQ counts it again when it comes to its own topic. Here another process brings it there, so it counts at once in
    both; a half message counts in its own topic with its end.
    """
    if properties.get("TRAN_MSG") == "true":
        return (HALF_TOPIC,)
    return topic, SCHEDULE_TOPIC if "DELAY" in properties else TIMER_TOPIC
