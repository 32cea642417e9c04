"""Constants of the on-disk format: magics, sysFlag bits, property names, limits (spec 2.1, 2.3, 2.6, 2.7).

Every number that two modules must agree on is defined here, so that a reader of the format has one place to look. All
integers on disk are big-endian; offsets and sizes are bytes, time stamps milliseconds since the epoch.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# Signed, because RocketMQ's integers are: comparing an unpacked ">i" with an unsigned literal would never match.
MAGIC_V1: Final = 0xDAA320A7 - (1 << 32)
MAGIC_V2: Final = 0xDAA320AB - (1 << 32)
MAGIC_FILLER: Final = 0xCBD43194 - (1 << 32)

FILLER_BYTES: Final = 8
"""Bytes that must stay free behind every record, so that the end of a segment can be marked (spec 2.11)."""

UNIT_BYTES: Final = 20
"""One ConsumeQueue unit: physical offset i8, record size i4, tags code i8 (spec 3.1)."""

BATCH_UNIT_BYTES: Final = 46
"""One unit of a BatchCQ queue (spec 3.9)."""

PREBLANK_SIZE: Final = 0x7FFFFFFF
"""Size field of a unit that only fills the queue up to its first real offset (spec 3.3)."""

SIZE_OFFSET: Final = 0
MAGIC_OFFSET: Final = 4
BODY_CRC_OFFSET: Final = 8
QUEUE_ID_OFFSET: Final = 12
FLAG_OFFSET: Final = 16
QUEUE_OFFSET_OFFSET: Final = 20
PHYSICAL_OFFSET_OFFSET: Final = 28
SYS_FLAG_OFFSET: Final = 36
BORN_TIMESTAMP_OFFSET: Final = 40
BORN_HOST_OFFSET: Final = 48
# Behind the hosts: add the bytes of bornHost, and from reconsumeTimes on those of storeHost.
STORE_TIMESTAMP_OFFSET: Final = 48
STORE_HOST_OFFSET: Final = 56
RECONSUME_TIMES_OFFSET: Final = 56
PREPARED_OFFSET_OFFSET: Final = 60
BODY_SIZE_OFFSET: Final = 68
BODY_OFFSET: Final = 72

HOST_BYTES: Final = 8
HOST_V6_BYTES: Final = 20
"""An address of 4 or 16 bytes and a port of 4."""

MIN_RECORD_BYTES: Final = 91
"""A v1 record with two IPv4 hosts and neither body, topic nor properties."""


# A message in a client batch, also called an element (spec 2.8).
ELEMENT_MAGIC_OFFSET: Final = 4
ELEMENT_CRC_OFFSET: Final = 8
ELEMENT_FLAG_OFFSET: Final = 12
ELEMENT_BODY_SIZE_OFFSET: Final = 16
ELEMENT_BODY_OFFSET: Final = 20
ELEMENT_BYTES: Final = 22
"""An element without body and properties."""


class SysFlag:
    """Bits of a record's sysFlag (spec 2.3)."""

    COMPRESSED: Final = 0x001
    MULTI_TAGS: Final = 0x002
    TRANSACTION_MASK: Final = 0x00C
    TRANSACTION_PREPARED: Final = 0x004
    TRANSACTION_COMMIT: Final = 0x008
    TRANSACTION_ROLLBACK: Final = 0x00C
    BORN_HOST_V6: Final = 0x010
    STORE_HOST_V6: Final = 0x020
    NEED_UNWRAP: Final = 0x040
    INNER_BATCH: Final = 0x080
    COMPRESSION_MASK: Final = 0x700
    COMPRESSION_LZ4: Final = 0x100
    COMPRESSION_ZSTD: Final = 0x200
    COMPRESSION_ZLIB: Final = 0x300


class Property:
    """Names of properties with a meaning to the store or the client (spec 2.6)."""

    KEYS: Final = "KEYS"
    TAGS: Final = "TAGS"
    WAIT: Final = "WAIT"
    DELAY: Final = "DELAY"
    RETRY_TOPIC: Final = "RETRY_TOPIC"
    REAL_TOPIC: Final = "REAL_TOPIC"
    REAL_QUEUE_ID: Final = "REAL_QID"
    TRANSACTION_PREPARED: Final = "TRAN_MSG"
    PRODUCER_GROUP: Final = "PGROUP"
    UNIQUE_KEY: Final = "UNIQ_KEY"
    CLUSTER: Final = "CLUSTER"
    REGION: Final = "MSG_REGION"
    TRACE_ON: Final = "TRACE_ON"
    SHARDING_KEY: Final = "__SHARDINGKEY"
    PRIORITY: Final = "_SYS_MSG_PRIORITY_"
    INNER_NUM: Final = "INNER_NUM"
    INNER_BASE: Final = "INNER_BASE"
    TIMER_DELAY_SECONDS: Final = "TIMER_DELAY_SEC"
    TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
    TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
    INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
    INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
    PRODUCER_SEQUENCE: Final = "__PSEQ__"
    CRC32: Final = "__CRC32#"
    TIMER_OUT_MS: Final = "TIMER_OUT_MS"
    TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
    TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
    TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
    TIMER_DELETE_KEY: Final = "TIMER_DEL_UNIQKEY"
    TRANSACTION_ID: Final = "__transactionId__"
    TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
    TRANSACTION_IMMUNITY_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    TRANSACTION_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
    ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
    RECONSUME_TIME: Final = "RECONSUME_TIME"
    MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
    ORIGIN_GROUP: Final = "ORIGIN_GROUP"
    POP_CHECK_POINT: Final = "POP_CK"
    FIRST_POP_TIME: Final = "1ST_POP_TIME"
    CORRELATION_ID: Final = "CORRELATION_ID"
    REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
    TTL: Final = "TTL"
    MESSAGE_TYPE: Final = "MSG_TYPE"
    BORN_TIMESTAMP: Final = "BORN_TIMESTAMP"
    TRACE_CONTEXT: Final = "TRACE_CONTEXT"


KEY_SEPARATOR: Final = " "
NAME_VALUE_SEPARATOR: Final = b"\x01"
PROPERTY_SEPARATOR: Final = b"\x02"

CRC_PROPERTY_PREFIX: Final = b"__CRC32#\x01"
CRC_PROPERTY_BYTES: Final = 20
"""``__CRC32#`` 0x01, ten digits, 0x02: always the record's last bytes (spec 2.9)."""

MAX_PROPERTIES_BYTES: Final = 32_767
MAX_TOPIC_UNITS: Final = 127
MAX_LONG_TOPIC_UNITS: Final = 255
MAX_GROUP_UNITS: Final = 120
V1_TOPIC_UNITS: Final = 127
"""A topic longer than this many UTF-16 units makes the record a v2 one (spec 2.1)."""

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
WAITING_TOPICS: Final = frozenset(
    ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC")
)
"""Topics of the node whose messages are meant for another one: delayed, timed, in a transaction, and given up in one."""
DEAD_LETTER_GROUP: Final = "CMQ_DEAD_LETTERS"
"""The group whose committed offset in ``%DLQ%group`` says which dead letters were resent or purged; the node's own."""
DEAD_LETTER_PASSES: Final = "CMQ_DEAD_LETTER_PASSES"
"""The topic in which each resend of dead letters stores a line when it begins to send."""
LMQ_PREFIX: Final = "%LMQ%"
"""Prefix of light message queues: messages of other topics name them; they have queue 0 only and no topic (spec 3.10).
"""
MULTI_DISPATCH_SEPARATOR: Final = ","


class Host(NamedTuple):
    """A socket address as a record holds it: ``ip`` is IPv4 or IPv6 text, ``port`` a signed 32-bit number."""

    ip: str
    port: int
