"""What the records of one sender, topic and queue have in common, made once: for a gateway, which encodes for its clients.

:meth:`commitmq.store.log.run_check.RunCheck.encode` makes the first record; here its parts are used again.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
from isal import isal_zlib

from commitmq.format.constants import (
    BODY_OFFSET,
    BODY_SIZE_OFFSET,
    BORN_HOST_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    MAX_PROPERTIES_BYTES,
)
from commitmq.kernels import codes
from commitmq.kernels.compiled import encode_batch, measure_batch
from commitmq.store.log.run_check import CRC_SLOT, MessageIllegalError, RunCheck, sentence_of

_HEAD: Final = struct.Struct(">iiiiiqqiq")  # totalSize … bornTimestamp
_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">H")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class RecordForm:
    """See the module. All sizes are bytes."""

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
        _, magic, _, queue, flags, _, _, system, _ = _HEAD.unpack_from(record)
        self._fields = magic, queue, flags, system
        self._hosts = bytes(record[BORN_HOST_OFFSET : BODY_SIZE_OFFSET + hosts])
        self._topic = bytes(record[body_at : len(record) - 2 - len(self._slot)])
        self._head = np.frombuffer(bytes(record[:body_at]), np.uint8)
        self._topic_field = np.frombuffer(self._topic, np.uint8)

    def record(self, body: Any, properties: bytes, born_timestamp: int) -> bytes:
        """One record. ``properties`` are encoded pairs without a CRC slot, which the caller has checked.

        Raises MessageIllegalError for sizes over the limits.
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
                _HEAD.pack(total, magic, crc, queue, flag, 0, 0, sys_flag, born_timestamp),
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
