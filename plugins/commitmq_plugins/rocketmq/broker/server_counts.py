"""What this server counts for ``/metrics``, under RocketMQ's names: the time of requests, and the connected clients."""

from __future__ import annotations

from collections import Counter
from time import monotonic_ns
from typing import Final

from commitmq.counting.family import Family, Kind
from commitmq.counting.table import CountTable
from commitmq_plugins.rocketmq.broker.registry import Member, Registry
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.server import Connection

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
    """See the module. All methods are called in the loop."""

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

    def look(self, registry: Registry[Connection]) -> None:
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

    def _client(self, member: Member) -> tuple[str, str]:
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
