"""CommitMQ: a message storage node whose files are RocketMQ's, byte for byte, and its clients.

This is the public API. Names are loaded when they are first used: a program that only produces does not pay for what a
consumer needs, and ``import commitmq`` itself costs nothing.
"""

from __future__ import annotations

# Nothing is imported here, not even typing: the command line is interrupted quietly from its first module on.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from commitmq.client.admin import Admin
    from commitmq.client.aio import AsyncAdmin, AsyncConsumer, AsyncProducer
    from commitmq.client.consumer import Consumer
    from commitmq.client.message import Message, Tombstone
    from commitmq.client.producer import Producer
    from commitmq.client.receiving.batch import MessageBatch
    from commitmq.client.receiving.query import QueryResult
    from commitmq.client.results import BatchResult, BatchSendError, SendResult
    from commitmq.client.selector import MessageSelector, Sql
    from commitmq.errors import (
        CommitMQError,
        ConfigError,
        CorruptRecordError,
        DiskFullError,
        FencedError,
        FilterError,
        InvalidMessageError,
        MissingExtraError,
        NodeUnavailableError,
        OffsetOutOfRangeError,
        Outcome,
        ProtocolError,
        SegmentSizeError,
        SendError,
        StoreError,
        StoreLockedError,
        UndecodableBodyError,
    )
    from commitmq.plugin.hookspecs import hookimpl

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncConsumer",
    "AsyncProducer",
    "BatchResult",
    "BatchSendError",
    "CommitMQError",
    "ConfigError",
    "Consumer",
    "CorruptRecordError",
    "DiskFullError",
    "FencedError",
    "FilterError",
    "InvalidMessageError",
    "Message",
    "MessageBatch",
    "MessageSelector",
    "MissingExtraError",
    "NodeUnavailableError",
    "OffsetOutOfRangeError",
    "Outcome",
    "Producer",
    "ProtocolError",
    "QueryResult",
    "SegmentSizeError",
    "SendError",
    "SendResult",
    "Sql",
    "StoreError",
    "StoreLockedError",
    "Tombstone",
    "UndecodableBodyError",
    "hookimpl",
]

_HOMES = {
    "Admin": "commitmq.client.admin",
    "AsyncAdmin": "commitmq.client.aio",
    "AsyncConsumer": "commitmq.client.aio",
    "AsyncProducer": "commitmq.client.aio",
    "BatchResult": "commitmq.client.results",
    "BatchSendError": "commitmq.client.results",
    "Consumer": "commitmq.client.consumer",
    "Message": "commitmq.client.message",
    "Tombstone": "commitmq.client.message",
    "MessageBatch": "commitmq.client.receiving.batch",
    "MessageSelector": "commitmq.client.selector",
    "Producer": "commitmq.client.producer",
    "QueryResult": "commitmq.client.receiving.query",
    "SendResult": "commitmq.client.results",
    "Sql": "commitmq.client.selector",
    "hookimpl": "commitmq.plugin.hookspecs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES.get(name, "commitmq.errors")), name)
    globals()[name] = value  # the next look-up finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
