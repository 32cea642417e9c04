"""The server's counts: what sends, pulls, pops and acks add to the statistics, and request 315 (remoting 1.10).

RocketMQ's system topics: those of its broker itself (remoting 1.8).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from datetime import date
from itertools import accumulate
from time import monotonic_ns
from typing import Final, NamedTuple

from commitmq.counting import CountTable, Family, Kind
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.retry import retry_topic
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import HALF_TOPIC
from commitmq_plugins.rocketmq.broker.registry import ClientChannelInfo, Registry
from commitmq_plugins.rocketmq.remoting.bodies import StatsItem, broker_stats_data
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.headers import ViewBrokerStatsDataRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

SAMPLE_S: Final = 10.0
MAX_ITEMS: Final = 100_000
_IDLE_S: Final = 86_400.0


class _Sample(NamedTuple):
    at_s: float
    value: int
    times: int


class _Window:
    """The newest samples, ``period_s`` apart; the first and the last of them span the window."""

    def __init__(self, period_s: float, count: int) -> None:
        self._period_s = period_s
        self._samples: deque[_Sample] = deque(maxlen=count + 1)

    def sample(self, now_s: float, value: int, times: int) -> None:
        if not self._samples or now_s - self._samples[-1].at_s >= self._period_s - 0.5:
            self._samples.append(_Sample(now_s, value, times))

    def figures(self, now_s: float, value: int, times: int) -> StatsItem:
        """From the oldest sample to now."""
        if not self._samples:
            return StatsItem()
        first = self._samples[0]
        total, count = value - first.value, times - first.times
        seconds = max(now_s - first.at_s, self._period_s)  # a count that has just begun has no rate of its own yet
        return StatsItem(total, total / seconds, total / count if count else 0.0)


class _Item:
    """One count with its windows."""

    def __init__(self, now_s: float) -> None:
        self.value = self.times = 0
        self.changed_s = now_s
        self.windows = (_Window(SAMPLE_S, 6), _Window(600.0, 6), _Window(3_600.0, 24))
        self.sample(now_s)

    def sample(self, now_s: float) -> None:
        for window in self.windows:
            window.sample(now_s, self.value, self.times)


class Statistics:
    """Counts of what RocketMQ's clients send and receive, per minute, hour and day (remoting 1.10). Pure: no clock.

    Counts are memory only and begin at 0 with the process, as RocketMQ's do. A window's figures come from samples of
    the counts: every ``SAMPLE_S`` for the minute, every ten minutes for the hour, and every hour for the day.

    At most ``max_items`` counts are kept; one that did not change for a day goes.
    """

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self._max = max_items
        self._items: dict[tuple[str, str], _Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, name: str, key: str, value: int, now_s: float, times: int = 1) -> None:
        """Count ``value`` in ``times`` events."""
        item = self._items.get((name, key))
        if item is None:
            if len(self._items) >= self._max:
                return
            item = self._items[name, key] = _Item(now_s)
        item.value += value
        item.times += times
        item.changed_s = now_s

    def sample(self, now_s: float) -> None:
        """To be called every ``SAMPLE_S``."""
        for key, item in list(self._items.items()):
            if now_s - item.changed_s > _IDLE_S:
                del self._items[key]
            else:
                item.sample(now_s)

    def total(self, name: str, key: str) -> int:
        """The count since it began."""
        item = self._items.get((name, key))
        return 0 if item is None else item.value

    def figures(self, name: str, key: str, now_s: float) -> tuple[StatsItem, StatsItem, StatsItem] | None:
        """Of the last minute, hour and day; None for what was never counted."""
        item = self._items.get((name, key))
        if item is None:
            return None
        minute, hour, day = (window.figures(now_s, item.value, item.times) for window in item.windows)
        return minute, hour, day


_CLASSES: Final = ("<=0ms", "0~10ms", "10~50ms", "50~100ms", "100~200ms", "200~500ms", "500ms~1s", "1~2s", "2~3s", "3~4s",
                   "4~5s", "5~10s", "10s~")  # fmt: skip
_CLASS_BEGINS_MS: Final = (1, 10, 50, 100, 200, 500, 1_000, 2_000, 3_000, 4_000, 5_000, 10_000)
_STEPS: Final = ((1, 20), (2, 15), (5, 10), (10, 10), (50, 6), (100, 5), (1_000, 9))
"""Width in ms and number of the classes from which shares are told; a last one has everything longer."""
_ENDS_MS: Final = tuple(accumulate(width for width, count in _STEPS for _ in range(count)))
_MINUTE_S: Final = 60.0


class PutTimes:
    """How long the node took to store runs of messages, in the classes and shares of RocketMQ's tools (remoting 1.10). Pure.

    A time is that from the hand-over of a run to the writer until its answer, so it includes the wait for the disk.
    RocketMQ's is that of the store alone, each for one message or batch. The classes and shares are of the last whole
    minute, as in RocketMQ.
    """

    def __init__(self, now_s: float) -> None:
        self.longest_ms = self.failed = 0
        self._began_s = now_s
        self._now = [0] * (len(_ENDS_MS) + 1), [0] * len(_CLASSES)
        self._last = [0] * (len(_ENDS_MS) + 1), [0] * len(_CLASSES)

    def add(self, took_s: float, now_s: float) -> None:
        """A run was stored."""
        if now_s - self._began_s >= _MINUTE_S:
            self._turn(now_s)
        took_ms = int(took_s * 1_000)
        if took_ms > self.longest_ms:
            self.longest_ms = took_ms
        self._now[0][bisect_left(_ENDS_MS, took_ms)] += 1
        self._now[1][bisect_right(_CLASS_BEGINS_MS, took_ms)] += 1

    def classes(self, now_s: float) -> str:
        """``[<=0ms]:3 [0~10ms]:5 …``"""
        self._turn(now_s)
        return "".join(f"[{name}]:{count} " for name, count in zip(_CLASSES, self._last[1], strict=True))

    def share_ms(self, share: float, now_s: float) -> float:
        """The time within which this ``share`` of the runs was stored; 0 without any. Within a class it is interpolated."""
        self._turn(now_s)
        counts = self._last[0]
        wanted, passed = int(sum(counts) * share), 0
        for at, count in enumerate(counts):
            if wanted <= passed + count:
                begin = _ENDS_MS[at - 1] if at else 0
                end = _ENDS_MS[at] if at < len(_ENDS_MS) else begin
                return begin + (end - begin) * (wanted - passed) / count if count else float(begin)
            passed += count
        return 0.0

    def _turn(self, now_s: float) -> None:
        """Begin another minute, if this one is over."""
        passed_s = now_s - self._began_s
        if passed_s < _MINUTE_S:
            return
        empty = [0] * (len(_ENDS_MS) + 1), [0] * len(_CLASSES)
        self._last = self._now if passed_s < 2 * _MINUTE_S else ([0] * len(empty[0]), [0] * len(empty[1]))
        self._now = empty
        self._began_s = now_s - passed_s % _MINUTE_S


RPC_LATENCY: Final = Family(
    "rocketmq_rpc_latency_milliseconds",
    Kind.HISTOGRAM,
    "Time of a request of RocketMQ's clients. A pull that took longer than 50 ms counts as one that waited for messages.",
    ("protocol_type", "request_code", "response_code", "is_long_polling", "result"),
    (1.0, 3.0, 5.0, 7.0, 10.0, 100.0, 1_000.0, 2_000.0, 3_000.0),
    1e-6,
)
PRODUCER_CONNECTIONS: Final = Family(
    "rocketmq_producer_connections",
    Kind.GAUGE,
    "Connected producers of RocketMQ's clients.",
    ("language", "version", "protocol_type"),
)
CONSUMER_CONNECTIONS: Final = Family(
    "rocketmq_consumer_connections",
    Kind.GAUGE,
    "Members of consumer groups.",
    ("consumer_group", "language", "version", "consume_mode", "protocol_type", "is_system"),
)
_Labels = tuple[str, ...]
_PROTOCOL: Final = "remoting"
_POLLS: Final = frozenset((RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.POP_MESSAGE))
_WAITED_NS: Final = 50_000_000
_V4_0_0: Final = 213
_V5_9_9: Final = 611
"""The last one that RocketMQ 5.4.0 has a name for."""
_OTHER: Final = "other"
_OTHERS: Final = (_OTHER, _OTHER)
_MOST_CLIENTS: Final = 32
_LOOK_NS: Final = 2_000_000_000
_MODES: Final = {"CONSUME_ACTIVELY": "pull", "CONSUME_PASSIVELY": "push", "CONSUME_POP": "pop"}


def version_name(version: int) -> str:
    """As RocketMQ's label shows it, ``v5_4_0``. From V4_0_0 on each version has its snapshot's number before its own."""
    number = version - _V4_0_0
    if number < 0:
        return f"v{version}"
    release = -(-number // 2)
    name = f"v{4 + release // 100}_{release // 10 % 10}_{release % 10}"
    return name if number % 2 == 0 else f"{name}_snapshot"


class ServerCounts:
    """What this server counts for ``/metrics``, under RocketMQ's names: the time of requests, and the connected clients.

    All methods are called in the loop.
    """

    def __init__(self, table: CountTable) -> None:
        self._table = table
        self._next_look_ns = 0
        self._clients: set[tuple[str, str]] = set()
        table.set_all(PRODUCER_CONNECTIONS, {})
        table.set_all(CONSUMER_CONNECTIONS, {})

    def began(self) -> int:
        """The moment at which a request came."""
        return monotonic_ns()

    def answered(self, began_ns: int, command: Command, answer: Command | None) -> None:
        """The request ``command`` has its ``answer``; None for none, or for one that is on its way already."""
        took_ns = monotonic_ns() - began_ns
        is_poll = command.code in _POLLS and took_ns >= _WAITED_NS
        code = ResponseCode.SUCCESS if answer is None else answer.code
        result = "oneway" if command.is_oneway else "success"
        if answer is not None and code == ResponseCode.SYSTEM_ERROR:
            result = "process_request_failed"
        labels = (_PROTOCOL, _name_of(RequestCode, command.code), _name_of(ResponseCode, code))
        self._table.histogram(RPC_LATENCY, *labels, "true" if is_poll else "false", result).observe(took_ns)

    def look(self, registry: Registry[RemotingConnection]) -> None:
        """Count who is connected, some seconds after the last time."""
        now_ns = monotonic_ns()
        if now_ns < self._next_look_ns:
            return
        self._next_look_ns = now_ns + _LOOK_NS
        producers: Counter[_Labels] = Counter()
        for members in registry.producers.values():
            producers.update((*self._client(one), _PROTOCOL) for one in members.values())
        consumers: Counter[_Labels] = Counter()
        for group in registry.groups.values():
            mode = _MODES.get(group.consume_type, "push")
            flag = "true" if group.name.lower().startswith("cid_rmq_sys_") else "false"
            consumers.update((group.name, *self._client(one), mode, _PROTOCOL, flag) for one in group.members.values())
        self._table.set_all(PRODUCER_CONNECTIONS, producers)
        self._table.set_all(CONSUMER_CONNECTIONS, consumers)

    def _client(self, member: ClientChannelInfo) -> tuple[str, str]:
        """Language and version. Both are what the client says: few pairs are labels, or made-up ones would fill the table."""
        found = member.language.name.lower(), _version_label(member.version)
        if found not in self._clients:
            if len(self._clients) >= _MOST_CLIENTS:
                return _OTHERS
            self._clients.add(found)
        return found


def _version_label(version: int) -> str:
    return version_name(version) if _V4_0_0 <= version <= _V5_9_9 else _OTHER


def _name_of(codes: type[RequestCode] | type[ResponseCode], code: int) -> str:
    try:
        return codes(code).name.lower()
    except ValueError:
        return "unknown"


SYSTEM_PREFIX: Final = "rmq_sys_"
SYSTEM_TOPICS: Final = (
    *("SELF_TEST_TOPIC", "TBW102", "BenchmarkTest", "OFFSET_MOVED_EVENT", "SCHEDULE_TOPIC_XXXX"),
    *("RMQ_SYS_TRACE_TOPIC", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"),
    *("RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"),
    *("TRANS_CHECK_MAX_TIME_TOPIC", "rmq_sys_wheel_timer"),
)
"""Those whose names are the same for every broker."""

_NAMES: Final = frozenset(SYSTEM_TOPICS)


def is_system_topic(topic: str) -> bool:
    return topic in _NAMES or topic.startswith(SYSTEM_PREFIX)


_USERS: Final = "_WITHOUT_SYSTEM_TOPIC"
"""The counts whose names end so leave out the topics of the broker itself."""


class Counting:
    """The server's counts. Broker-wide counts have the cluster's name as their key."""

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

    def view(self, connection: RemotingConnection, command: Command) -> Command:
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
