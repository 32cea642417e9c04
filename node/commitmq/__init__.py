"""CommitMQ: a message storage node whose files are RocketMQ's, byte for byte, and its clients.

This is the public API. Names are loaded when they are first used: a program that only produces does not load a
consumer's modules, and ``import commitmq`` itself costs nothing.
"""

from __future__ import annotations

# Nothing is imported here, not even typing: the command line is interrupted quietly from its first module on.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from commitmq.client.admin import Admin
    from commitmq.client.admin_config import ConfigChange, ConfigImport
    from commitmq.client.admin_results import (
        ClientInfo,
        ConnectedClients,
        GroupOffset,
        Lag,
        QueueBounds,
        TopicCreated,
        TopicDescription,
        TopicInfo,
    )
    from commitmq.client.aio import AsyncAdmin, AsyncConsumer, AsyncProducer, AsyncReader
    from commitmq.client.connection import AsyncConnection, Connection, connect, connect_async
    from commitmq.client.consumer import Consumer, Reader
    from commitmq.client.dead_letters import DeadLetter, DeadLetterFilter, PurgeResult, ResendFailure, ResendResult
    from commitmq.client.delayed import DelayedMessage, DelayedMessages
    from commitmq.client.handling.consume_result import ConsumeResult, RetryLater
    from commitmq.client.handling.settings import HandlerCounts
    from commitmq.client.message import Message, Tombstone
    from commitmq.client.producer import Producer
    from commitmq.client.producing.fault_strategy import FaultStrategy
    from commitmq.client.receiving.batch import MessageBatch
    from commitmq.client.receiving.query import QueryResult
    from commitmq.client.results import BatchResult, BatchSendError, SendResult
    from commitmq.client.selector import MessageSelector, Sql
    from commitmq.client.sending.options import ExactlyOnce
    from commitmq.client.sharing.aio_share import AsyncShareConsumer
    from commitmq.client.sharing.share_consumer import ShareConsumer
    from commitmq.client.tracing import async_handler_span, handler_span, send_span
    from commitmq.client.transactions.half_message import (
        HalfMessage,
        TransactionListener,
        TransactionResult,
        TransactionState,
    )
    from commitmq.client.transactions.transaction import AsyncTransaction, OpenTransaction, Transaction
    from commitmq.errors import (
        AuthenticationError,
        Code,
        CommitMQError,
        ConfigError,
        CorruptRecordError,
        DiskFullError,
        FencedError,
        FilterError,
        GroupNotFoundError,
        InvalidMessageError,
        MissingExtraError,
        NodeUnavailableError,
        OffsetOutOfRangeError,
        Outcome,
        ProducerFencedError,
        ProtocolError,
        RequestError,
        RequestTimeoutError,
        SegmentSizeError,
        SendError,
        StoreError,
        StoreLockedError,
        TopicNotFoundError,
        UndecodableBodyError,
    )
    from commitmq.plugin.hookspecs import hookimpl

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncConnection",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncReader",
    "AsyncShareConsumer",
    "AsyncTransaction",
    "AuthenticationError",
    "BatchResult",
    "BatchSendError",
    "ClientInfo",
    "Code",
    "CommitMQError",
    "ConfigChange",
    "ConfigError",
    "ConfigImport",
    "ConnectedClients",
    "Connection",
    "ConsumeResult",
    "Consumer",
    "CorruptRecordError",
    "DeadLetter",
    "DeadLetterFilter",
    "DelayedMessage",
    "DelayedMessages",
    "DiskFullError",
    "ExactlyOnce",
    "FaultStrategy",
    "FencedError",
    "FilterError",
    "GroupNotFoundError",
    "GroupOffset",
    "HalfMessage",
    "HandlerCounts",
    "InvalidMessageError",
    "Lag",
    "Message",
    "MessageBatch",
    "MessageSelector",
    "MissingExtraError",
    "NodeUnavailableError",
    "OffsetOutOfRangeError",
    "OpenTransaction",
    "Outcome",
    "Producer",
    "ProducerFencedError",
    "ProtocolError",
    "PurgeResult",
    "QueryResult",
    "QueueBounds",
    "Reader",
    "RequestError",
    "RequestTimeoutError",
    "ResendFailure",
    "ResendResult",
    "RetryLater",
    "SegmentSizeError",
    "SendError",
    "SendResult",
    "ShareConsumer",
    "Sql",
    "StoreError",
    "StoreLockedError",
    "Tombstone",
    "TopicCreated",
    "TopicDescription",
    "TopicInfo",
    "TopicNotFoundError",
    "Transaction",
    "TransactionListener",
    "TransactionResult",
    "TransactionState",
    "UndecodableBodyError",
    "async_handler_span",
    "connect",
    "connect_async",
    "handler_span",
    "hookimpl",
    "send_span",
]

_HOMES = {
    "OpenTransaction": "commitmq.client.transactions.transaction",
    "HalfMessage": "commitmq.client.transactions.half_message",
    "TransactionResult": "commitmq.client.transactions.half_message",
    "TransactionListener": "commitmq.client.transactions.half_message",
    "TransactionState": "commitmq.client.transactions.half_message",
    "AsyncTransaction": "commitmq.client.transactions.transaction",
    "Transaction": "commitmq.client.transactions.transaction",
    "Admin": "commitmq.client.admin",
    "PurgeResult": "commitmq.client.dead_letters",
    "ResendFailure": "commitmq.client.dead_letters",
    "ResendResult": "commitmq.client.dead_letters",
    "DelayedMessage": "commitmq.client.delayed",
    "DelayedMessages": "commitmq.client.delayed",
    "DeadLetter": "commitmq.client.dead_letters",
    "DeadLetterFilter": "commitmq.client.dead_letters",
    "ClientInfo": "commitmq.client.admin_results",
    "ConfigChange": "commitmq.client.admin_config",
    "ConfigImport": "commitmq.client.admin_config",
    "ConnectedClients": "commitmq.client.admin_results",
    "GroupOffset": "commitmq.client.admin_results",
    "Lag": "commitmq.client.admin_results",
    "QueueBounds": "commitmq.client.admin_results",
    "TopicCreated": "commitmq.client.admin_results",
    "TopicDescription": "commitmq.client.admin_results",
    "TopicInfo": "commitmq.client.admin_results",
    "AsyncAdmin": "commitmq.client.aio",
    "AsyncShareConsumer": "commitmq.client.sharing.aio_share",
    "ShareConsumer": "commitmq.client.sharing.share_consumer",
    "AsyncConnection": "commitmq.client.connection",
    "AsyncConsumer": "commitmq.client.aio",
    "AsyncProducer": "commitmq.client.aio",
    "AsyncReader": "commitmq.client.aio",
    "BatchResult": "commitmq.client.results",
    "BatchSendError": "commitmq.client.results",
    "Connection": "commitmq.client.connection",
    "ConsumeResult": "commitmq.client.handling.consume_result",
    "Consumer": "commitmq.client.consumer",
    "HandlerCounts": "commitmq.client.handling.settings",
    "RetryLater": "commitmq.client.handling.consume_result",
    "ExactlyOnce": "commitmq.client.sending.options",
    "FaultStrategy": "commitmq.client.producing.fault_strategy",
    "Message": "commitmq.client.message",
    "Tombstone": "commitmq.client.message",
    "MessageBatch": "commitmq.client.receiving.batch",
    "MessageSelector": "commitmq.client.selector",
    "Producer": "commitmq.client.producer",
    "QueryResult": "commitmq.client.receiving.query",
    "Reader": "commitmq.client.consumer",
    "SendResult": "commitmq.client.results",
    "Sql": "commitmq.client.selector",
    "async_handler_span": "commitmq.client.tracing",
    "handler_span": "commitmq.client.tracing",
    "send_span": "commitmq.client.tracing",
    "connect": "commitmq.client.connection",
    "connect_async": "commitmq.client.connection",
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
