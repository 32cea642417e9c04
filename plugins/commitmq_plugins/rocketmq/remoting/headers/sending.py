"""Headers of sends, send-backs, transactions' ends, replies and recalls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from commitmq_plugins.rocketmq.remoting.headers.header import Header, Int, Long, header


@header
class SendMessageRequestHeader(Header):
    """Requests 10 and 324, and the fields of all other sends."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int
    queue_id: Int
    sys_flag: Int
    born_timestamp: Long
    flag: Int
    properties: str | None = None
    reconsume_times: Int | None = None
    unit_mode: bool = False
    max_reconsume_times: Int | None = None
    batch: bool = False
    broker_name: str | None = None

    WIRE: ClassVar[Mapping[str, str]] = {"broker_name": "bname"}


@header
class SendMessageRequestHeaderV2(SendMessageRequestHeader):
    """Requests 310, 320 and 325: the same fields under one-letter names."""

    WIRE: ClassVar[Mapping[str, str]] = {
        "producer_group": "a",
        "topic": "b",
        "default_topic": "c",
        "default_topic_queue_nums": "d",
        "queue_id": "e",
        "sys_flag": "f",
        "born_timestamp": "g",
        "flag": "h",
        "properties": "i",
        "reconsume_times": "j",
        "unit_mode": "k",
        "max_reconsume_times": "l",
        "batch": "m",
        "broker_name": "n",
    }


def decode_send(ext_fields: Mapping[str, str]) -> SendMessageRequestHeader:
    """The header of any send: with letters if there is an ``a``, else with long names (remoting 3.1)."""
    kind = SendMessageRequestHeaderV2 if "a" in ext_fields else SendMessageRequestHeader
    return kind.decode(ext_fields)


@header
class SendMessageResponseHeader(Header):
    """The answer to a send. ``msg_id`` is the offset message id, of a batch all of them with commas between."""

    msg_id: str
    queue_id: Int
    queue_offset: Long
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None


@header
class ConsumerSendMsgBackRequestHeader(Header):
    """Request 36. ``offset`` is the record's physical offset."""

    offset: Long
    group: str
    delay_level: Int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int | None = None


@header
class EndTransactionRequestHeader(Header):
    """Request 37. ``commit_or_rollback``: 0 unknown, 8 commit, 12 roll back."""

    producer_group: str
    tran_state_table_offset: Long
    commit_log_offset: Long
    commit_or_rollback: Int
    msg_id: str
    from_transaction_check: bool = False
    transaction_id: str | None = None
    topic: str | None = None


@header
class CheckTransactionStateRequestHeader(Header):
    """Request 39, to a producer. ``topic`` is the topic of half messages."""

    tran_state_table_offset: Long
    commit_log_offset: Long
    topic: str | None = None
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    broker_name: str | None = None

    WIRE: ClassVar[Mapping[str, str]] = {"broker_name": "bname"}


@header
class ReplyMessageRequestHeader(Header):
    """Request 326, to the producer that waits for a reply. Hosts are texts ``ip:port``."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int
    queue_id: Int
    sys_flag: Int
    born_timestamp: Long
    flag: Int
    born_host: str
    store_host: str
    store_timestamp: Long
    properties: str | None = None
    reconsume_times: Int | None = None
    unit_mode: bool = False


@header
class RecallMessageRequestHeader(Header):
    """Request 370."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


@header
class RecallMessageResponseHeader(Header):
    """The answer to 370: the unique key of the cancelled message."""

    msg_id: str
