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
_Row = tuple[Family, tuple[str, ...]]
_PROTOCOL: Final = "remoting"
_POLLS: Final = frozenset((RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.POP_MESSAGE))
_WAITED_NS: Final = 50_000_000
_V4_0_0: Final = 213
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
        self._connected: set[_Row] = set()
        table.reset(PRODUCER_CONNECTIONS)
        table.reset(CONSUMER_CONNECTIONS)

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
        found: Counter[_Row] = Counter()
        for members in registry.producers.values():
            found.update((PRODUCER_CONNECTIONS, (*_client(one), _PROTOCOL)) for one in members.values())
        for group in registry.groups.values():
            mode = _MODES.get(group.consume_type, "push")
            flag = "true" if group.name.lower().startswith("cid_rmq_sys_") else "false"
            found.update(
                (CONSUMER_CONNECTIONS, (group.name, *_client(one), mode, _PROTOCOL, flag))
                for one in group.members.values()
            )
        for (family, labels), count in found.items():
            self._table.count(family, *labels).set(count)
        for family, labels in self._connected - found.keys():
            self._table.count(family, *labels).set(0)
        self._connected = set(found)


def _client(member: Member) -> tuple[str, str]:
    return member.language.name.lower(), version_name(member.version)


def _name_of(codes: type[RequestCode] | type[ResponseCode], code: int) -> str:
    try:
        return codes(code).name.lower()
    except ValueError:
        return "unknown"
