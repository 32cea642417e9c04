"""Checks messages before they are appended to the CommitLog: a run that a client encoded, and the parts of a single
message.

A run is not copied: the appender stores the very bytes that were checked. A single message is encoded here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from isal import isal_zlib

from commitmq.errors import CommitMQError
from commitmq.format.constants import (
    BODY_OFFSET,
    BODY_SIZE_OFFSET,
    BORN_HOST_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    CRC_PROPERTY_BYTES,
    CRC_PROPERTY_PREFIX,
    HOST_V6_BYTES,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES_BYTES,
    MIN_RECORD_BYTES,
    V1_TOPIC_UNITS,
    SysFlag,
)
from commitmq.kernels import codes
from commitmq.kernels.codes import CLIENT_SYS_FLAGS
from commitmq.kernels.compiled import check_run, encode_batch, measure_batch, properties_reason

CRC_SLOT = CRC_PROPERTY_PREFIX + b"0" * 10 + b"\x02"
assert len(CRC_SLOT) == CRC_PROPERTY_BYTES
MAX_RECORD_OVERHEAD_BYTES = 65_536

# Properties that change the kind of a message. A plain send must not forge them (ARCHITECTURE section 4): they belong
# to delay, transactions, timers, inner batches and multi-dispatch, which have operations of their own.
FORBIDDEN_PROPERTIES = (
    "DELAY",
    "TRAN_MSG",
    "INNER_NUM",
    "INNER_BASE",
    "INNER_MULTI_DISPATCH",
    "INNER_MULTI_QUEUE_OFFSET",
    "TIMER_DELAY_SEC",
    "TIMER_DELAY_MS",
    "TIMER_DELIVER_MS",
    "TIMER_OUT_MS",
    "TIMER_DEL_UNIQKEY",
    "__PSEQ__",
    "__CRC32#",
)

# Those that a send to the CommitLog may carry: the writer then stores the message where it waits (see semantics).
SPECIAL_PROPERTIES = (
    "DELAY",
    "TRAN_MSG",
    "TIMER_DELAY_SEC",
    "TIMER_DELAY_MS",
    "TIMER_DELIVER_MS",
    "TIMER_DEL_UNIQKEY",
)

_SENTENCES = {
    codes.REASON_SHORT: "its size or the sizes inside point past the end",
    codes.REASON_MAGIC: "its magic is not that of a record",
    codes.REASON_LENGTHS: "the sizes of its parts do not add up to its size",
    codes.REASON_BODY_CRC: "its bodyCRC does not match its body",
    codes.REASON_PROPERTIES: "its properties are not name 0x01 value 0x02 pairs with non-empty names and values",
    codes.REASON_TOPIC: "it names another topic than the request",
    codes.REASON_QUEUE: "it names another queue than the request",
    codes.REASON_SYS_FLAG: "its sysFlag has bits that a plain send must not set, or another host layout than hello said",
    codes.REASON_RESERVED_FIELD: "a field that the node fills in is not zero",
    codes.REASON_RECORD_SIZE: "it is larger than commit_log.max_message_bytes + 65536",
    codes.REASON_BODY_SIZE: "its body is larger than commit_log.max_message_bytes",
    codes.REASON_FORBIDDEN_PROPERTY: "it carries a property that only the node may set",
    codes.REASON_CRC_SLOT: "its properties do not end with the 20-byte __CRC32# slot that hello asked for",
    codes.REASON_UTF8: "its properties are not UTF-8",
    codes.REASON_ZEROS: "a property's value holds 512 zero bytes in a row, as a sector does that never reached the disk",
    codes.REASON_SEQUENCE: "its last property is not the __PSEQ__ that the request's producer and sequence make",
    codes.REASON_PROPERTIES_SIZE: f"its properties are longer than {MAX_PROPERTIES_BYTES} bytes",
}

_INNER_BATCH = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP

_FIXED = struct.Struct(">iiiiiqqiq")  # totalSize … bornTimestamp: 48 bytes
_TAIL = struct.Struct(">iqi")


class MessageIllegalError(CommitMQError):
    """A message or run breaks a rule; no part was stored. ``code`` is RocketMQ's PutMessageStatus name."""

    def __init__(self, sentence: str, *, code: str = "MESSAGE_ILLEGAL") -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run that passed :meth:`RunCheck.check_run`. ``ends[i]`` is the end of record i in it. ``special`` has bit i set
    when a record carries SPECIAL_PROPERTIES[i]. ``moved``: its born hosts stay.
    """

    data: np.ndarray[Any, np.dtype[np.uint8]]
    ends: np.ndarray[Any, np.dtype[np.int64]]
    count: int
    special: int = 0
    moved: bool = False

    def without_first(self, count: int) -> CheckedRun:
        """The run without its first ``count`` records; ``count`` is less than the number of records."""
        start = int(self.ends[count - 1])
        return CheckedRun(self.data[start:], self.ends[count:] - start, self.count - count, self.special, self.moved)


def forbidden_names() -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]]]:
    """FORBIDDEN_PROPERTIES in the kernels' form: all names one after the other, and their ends."""
    names = [name.encode() for name in FORBIDDEN_PROPERTIES]
    return np.frombuffer(b"".join(names), np.uint8), np.cumsum([len(name) for name in names], dtype=np.int64)


def checked_names() -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]], int]:
    """The same for a run: FORBIDDEN_PROPERTIES, those that are special last, and the number of the first special one."""
    plain = [name for name in FORBIDDEN_PROPERTIES if name not in SPECIAL_PROPERTIES]
    names = [name.encode() for name in (*plain, *SPECIAL_PROPERTIES)]
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return np.frombuffer(b"".join(names), np.uint8), ends, len(plain)


def sentence_of(reason: int) -> str:
    """The meaning of a kernel's reason, as the end of "this record: …"."""
    return _SENTENCES.get(reason, f"reason {reason}")


class RunCheck:
    """The rules of one log; the appender of the log is one of these."""

    def __init__(self, *, store_host: bytes, max_message_bytes: int, properties_crc: bool) -> None:
        """``store_host``: 4 or 16 address bytes and a 4-byte port, big-endian."""
        self.max_message_bytes = max_message_bytes
        self.properties_crc = properties_crc
        self.store_host = store_host
        store_flag = int(SysFlag.STORE_HOST_V6) if len(store_host) == HOST_V6_BYTES else 0
        self._host_flags = store_flag, store_flag | int(SysFlag.BORN_HOST_V6)
        """The sysFlag bits of IPv6 hosts, where the born host is one of IPv4 and where it is one of IPv6."""
        self._names, self._name_ends = forbidden_names()
        self._run_names, self._run_name_ends, self._special_from = checked_names()
        self._no_names, self._no_ends = np.empty(0, np.uint8), np.empty(0, np.int64)
        self._ends = np.zeros(4096, np.int64)
        self._out = np.zeros(3, np.int64)

    def check_run(
        self,
        data: Any,
        topic: bytes,
        queue_id: int,
        *,
        born_v6: bool,
        moved: bool = False,
        forwarded: bool = False,
        mark: bytes = b"",
        sequence: int = 0,
    ) -> CheckedRun:
        """Check all of a run (any buffer); raises MessageIllegalError that names the record. Stores nothing.

        ``moved``: the run is a mover's, whose records may have any property, their own born host, and a body of any size: the
        log has it, whatever the limit is now. ``forwarded``: a
        gateway of this node sends it for clients, whose born hosts stay; the rules of properties hold. ``mark``: the mark
        of an idempotent producer, which record i must carry with the number ``sequence`` + i
        (:mod:`commitmq.format.producer_mark`); empty for a run without one.
        """
        buffer = np.frombuffer(data, np.uint8)
        if buffer.size < MIN_RECORD_BYTES:
            raise MessageIllegalError("the run is shorter than one record")
        most = buffer.size // MIN_RECORD_BYTES + 1
        if self._ends.size < most:
            self._ends = np.zeros(most, np.int64)
        flags = self._host_flags[born_v6]
        most_bytes = buffer.size if moved else self.max_message_bytes
        reason = check_run(
            buffer,
            np.frombuffer(topic, np.uint8),
            queue_id,
            most_bytes,
            most_bytes + MAX_RECORD_OVERHEAD_BYTES,
            flags,
            self.properties_crc,
            self._no_names if moved else self._run_names,
            self._no_ends if moved else self._run_name_ends,
            self._special_from,
            moved or forwarded,
            np.frombuffer(mark, np.uint8),
            sequence,
            self._ends,
            self._out,
        )
        count = int(self._out[0])
        if reason != codes.OK:
            raise MessageIllegalError(f"record {count} of the run, at byte {int(self._out[1])}: {sentence_of(reason)}")
        return CheckedRun(buffer, self._ends[:count], count, int(self._out[2]), moved or forwarded)

    def encode(
        self,
        topic: bytes,
        queue_id: int,
        body: Any,
        properties: bytes,
        *,
        sys_flag: int,
        flag: int,
        born_timestamp: int,
        born_host: bytes,
        reconsume_times: int = 0,
        checked: bool = False,
        inner_batch: bool = False,
        mark: bytes = b"",
    ) -> bytearray:
        """One record of a single send, complete except for the fields that :meth:`CommitLogAppender.append_record` fills in.

        ``properties`` are encoded pairs without a CRC slot; the caller has checked ``topic``. Raises
        MessageIllegalError for sizes over the limits and for malformed or forbidden properties; ``checked`` says that
        the caller has already checked the properties. ``inner_batch`` marks the body as a client batch.
        """
        size = len(body)
        if size > self.max_message_bytes:
            raise MessageIllegalError(
                f"the body has {size} bytes, commit_log.max_message_bytes allows {self.max_message_bytes}"
            )
        room = MAX_PROPERTIES_BYTES - (len(CRC_SLOT) if self.properties_crc else 0) - len(mark)
        if len(properties) > room:
            raise MessageIllegalError(
                f"the properties have {len(properties)} bytes, at most {room} fit", code="PROPERTIES_SIZE_EXCEEDED"
            )
        if sys_flag & ~CLIENT_SYS_FLAGS or (sys_flag & SysFlag.COMPRESSION_MASK) > SysFlag.COMPRESSION_ZLIB:
            raise MessageIllegalError("sys_flag may carry only the compression bits 0x1 and 0x700")
        if properties and not checked:
            reason = properties_reason(
                np.frombuffer(properties, np.uint8), 0, len(properties), self._names, self._name_ends
            )
            if reason != codes.OK:
                raise MessageIllegalError("the message: " + _SENTENCES[reason].replace("its ", "", 1))
        properties += mark
        if self.properties_crc:
            properties += CRC_SLOT
        if inner_batch:
            sys_flag |= _INNER_BATCH
        long_topic = len(topic) > V1_TOPIC_UNITS
        host_flags = self._host_flags[len(born_host) == HOST_V6_BYTES]
        hosts = len(born_host) + len(self.store_host)
        topic_bytes = (2 if long_topic else 1) + len(topic)
        total = BODY_OFFSET + hosts + size + topic_bytes + 2 + len(properties)
        return bytearray(
            b"".join(
                (
                    _FIXED.pack(
                        total,
                        MAGIC_V2 if long_topic else MAGIC_V1,
                        isal_zlib.crc32(body) & 0x7FFFFFFF if size else 0,
                        queue_id,
                        flag,
                        0,
                        0,
                        sys_flag | host_flags,
                        born_timestamp,
                    ),
                    born_host,
                    b"\0\0\0\0\0\0\0\0",
                    self.store_host,
                    _TAIL.pack(reconsume_times, 0, size),
                    body,
                    len(topic).to_bytes(2 if long_topic else 1, "big"),
                    topic,
                    len(properties).to_bytes(2, "big"),
                    properties,
                )
            )
        )


_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">H")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class RecordForm:
    """What the records of one sender, topic and queue have in common, made once: for a gateway, which encodes for its clients.

    :meth:`commitmq.store.log.run_check.RunCheck.encode` makes the first record; here its parts are used again.

    All sizes are bytes.
    """

    __slots__ = ("_check", "_empty", "_fields", "_head", "_hosts", "_room", "_slot", "_topic", "_topic_field")

    def __init__(
        self,
        check: RunCheck,
        topic: bytes,
        queue_id: int,
        *,
        sys_flag: int,
        flag: int,
        born_host: bytes,
        reconsume_times: int = 0,
    ) -> None:
        """Raises MessageIllegalError for a ``sys_flag`` that no client may set."""
        record = check.encode(
            topic,
            queue_id,
            b"",
            b"",
            sys_flag=sys_flag,
            flag=flag,
            born_timestamp=0,
            born_host=born_host,
            reconsume_times=reconsume_times,
            checked=True,
        )
        hosts = len(born_host) + len(check.store_host)
        body_at = BODY_OFFSET + hosts
        self._check = check
        self._empty = len(record)
        self._slot = CRC_SLOT if check.properties_crc else b""
        self._room = MAX_PROPERTIES_BYTES - len(self._slot)
        _, magic, _, queue, flags, _, _, system, _ = _FIXED.unpack_from(record)
        self._fields = magic, queue, flags, system
        self._hosts = bytes(record[BORN_HOST_OFFSET : BODY_SIZE_OFFSET + hosts])
        self._topic = bytes(record[body_at : len(record) - 2 - len(self._slot)])
        self._head = np.frombuffer(bytes(record[:body_at]), np.uint8)
        self._topic_field = np.frombuffer(self._topic, np.uint8)

    def record(self, body: Any, properties: bytes, born_timestamp: int) -> bytes:
        """One record. ``properties`` are encoded pairs without a CRC slot, which the caller has checked. Raises
        MessageIllegalError for sizes over the limits.
        """
        size, check = len(body), self._check
        if size > check.max_message_bytes or len(properties) > self._room:
            self._refuse(size, len(properties))
        magic, queue, flag, sys_flag = self._fields
        stored = len(properties) + len(self._slot)
        crc = isal_zlib.crc32(body) & 0x7FFFFFFF if size else 0
        total = self._empty + size + len(properties)
        return b"".join(
            (
                _FIXED.pack(total, magic, crc, queue, flag, 0, 0, sys_flag, born_timestamp),
                self._hosts,
                _INT.pack(size),
                body,
                self._topic,
                _SHORT.pack(stored),
                properties,
                self._slot,
            )
        )

    def _refuse(self, body_bytes: int, properties_bytes: int) -> None:
        if body_bytes > self._check.max_message_bytes:
            raise MessageIllegalError(
                f"the body has {body_bytes} bytes, commit_log.max_message_bytes allows {self._check.max_message_bytes}"
            )
        raise MessageIllegalError(
            f"the properties have {properties_bytes} bytes, at most {self._room} fit", code="PROPERTIES_SIZE_EXCEEDED"
        )

    def batch(self, data: Any, born_timestamp: int) -> tuple[Bytes, list[int]]:
        """The run of a client batch (spec 2.8), whose property bytes stay as they are, and the size of each record.
        Raises MessageIllegalError that names the message.
        """
        buffer = np.frombuffer(data, np.uint8)
        out = np.zeros(3, np.int64)
        reason = measure_batch(buffer, self._check.max_message_bytes, self._room, self._empty, out)
        if reason != codes.OK:
            if not buffer.size:
                raise MessageIllegalError("the batch is empty")
            raise MessageIllegalError(f"message {out[0]} of the batch, at byte {out[1]}: {sentence_of(reason)}")
        head = self._head.copy()
        head[BORN_TIMESTAMP_OFFSET:BORN_HOST_OFFSET] = np.frombuffer(born_timestamp.to_bytes(8, "big"), np.uint8)
        run, sizes = np.empty(int(out[2]), np.uint8), np.empty(int(out[0]), np.int64)
        encode_batch(buffer, head, self._topic_field, np.frombuffer(self._slot, np.uint8), run, sizes)
        return run, sizes.tolist()
