"""The common part of a producer: its state, its end, and the steps that all kinds of sends use."""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from commitmq.client import checks
from commitmq.client.message import Message, check_alone, check_body, check_flag, check_topic, content_of
from commitmq.client.properties import Keys, build_properties, check_properties_size, join_queue_names
from commitmq.client.results import SendResult
from commitmq.client.routes import not_stored, unknown
from commitmq.client.sending.asked import Asked, asked_time
from commitmq.client.sending.delivery import Sequences
from commitmq.client.sending.options import MessageOptions, check_ack, check_queue, needs_queue, shard
from commitmq.client.sending.outbox import Outbox
from commitmq.client.sending.pump import Lanes
from commitmq.client.sending.run_encoder import encode_user_properties
from commitmq.client.sending.send_future import SendFuture
from commitmq.errors import CommitMQError, InvalidMessageError
from commitmq.format.compression import compress
from commitmq.format.constants import Property
from commitmq.format.producer_mark import MAX_MARK_BYTES
from commitmq.format.unique_ids import UniqueIds
from commitmq.protocol import wire
from commitmq.protocol.channel import check_fork

if TYPE_CHECKING:
    from commitmq.client.requesting.reply_reader import ReplyReader
    from commitmq.client.tracing import Tracer
    from commitmq.client.transactions.group import TransactionGroup

_live: weakref.WeakSet[ProducerBase] = weakref.WeakSet()


def _disown() -> None:
    """Mark the parent's producers as closed in a forked child. So no send has to check for a fork."""
    for producer in _live:
        producer._closed = True
        producer._lanes.disown()


os.register_at_fork(after_in_child=_disown)


class ProducerBase:
    """See :class:`commitmq.Producer`, which sets all of the state."""

    _closed: bool
    _pid: int
    _ack: str
    _timeout_s: float
    _compress: str | None
    _compress_flags: int
    _compress_over: int
    _ids: UniqueIds
    _sequences: Sequences | None
    _lanes: Lanes
    _outbox: Outbox
    _tracer: Tracer | None
    _transactions: TransactionGroup | None
    _replies: ReplyReader

    def _is_made(self) -> None:
        """The constructor has succeeded: from now on the producer must be closed."""
        self._closed = False
        _live.add(self)

    def send(self, topic: str, body: bytes | Message, **fields: Unpack[MessageOptions]) -> SendResult:
        """See :meth:`commitmq.Producer.send`."""
        raise NotImplementedError

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every asynchronous send has its outcome.

        Raises TimeoutError when that takes longer than ``timeout_s`` (default: the producer's).
        """
        self._check_usable()
        self._check_may_wait()
        limit = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, zero=True)
        if not self._lanes.flush(time.monotonic() + limit):
            raise TimeoutError(f"{self._lanes.all_in_flight()} messages are still pending after {limit} s")

    # ------------------------------------------------------------ the end

    def close(self, timeout_s: float | None = None) -> None:
        """Send the pending messages (for at most ``timeout_s``, default the producer's), then close every connection.

        Sends that are still pending then fail: as not stored if the connection did not take them, as unknown otherwise.
        Closing twice is allowed.
        """
        limit = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, zero=True)
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + limit
        self._replies.close()
        self._lanes.close(deadline)
        if self._transactions is not None:
            self._transactions.close(max(deadline - time.monotonic(), 0))
        if self._tracer is not None:
            self._tracer.close(limit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            warnings.warn(f"unclosed producer {self!r}", ResourceWarning, source=self, stacklevel=2)
            if not sys.is_finalizing():  # at the end of the interpreter the producer's thread may hold a lock for ever
                self.close(timeout_s=0)

    def __repr__(self) -> str:
        return f"Producer({self._lanes.writer.lane.directory.address!r}, ack={self._ack!r})"

    # ------------------------------------------------------------ steps

    def _check_usable(self) -> None:
        check_fork(self._pid, "producer")
        if self._closed:
            raise CommitMQError("the producer is closed")

    def _limit(self, timeout_s: float | None) -> float:
        """The time of one call, in seconds."""
        return self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s)

    def _queue_of_key(self, topic: str, body: bytes | Message, sharding_key: str | None, deadline: float) -> int | None:
        """The queue that the message's sharding key picks, None without one. May ask the coordinator; raises SendError."""
        if isinstance(body, Message):
            sharding_key = sharding_key or body.properties.get(Property.SHARDING_KEY)
        if not sharding_key:
            return None
        if type(sharding_key) is not str:
            raise InvalidMessageError(f"sharding_key must be a string, not {type(sharding_key).__name__}")
        return shard(sharding_key, self._lanes.routes.queues(check_topic(topic), deadline))

    def _asked(
        self,
        delay: float | timedelta | None,
        delay_level: int | None,
        deliver_at: datetime | int | None,
        multi_dispatch: object = None,
    ) -> Asked:
        """What a send with a delay or a time of delivery asks for. Raises InvalidMessageError."""
        if self._sequences is not None:
            raise InvalidMessageError("an idempotent producer's messages cannot be delayed")
        if multi_dispatch is not None:
            raise InvalidMessageError("a message for further queues cannot be delayed")
        return asked_time(delay, delay_level, deliver_at)

    def _would_ask(self, topic: str, body: bytes | Message, fields: Mapping[str, Any]) -> bool:
        """Whether ``send_async`` of this message would ask the coordinator, and wait for the answer."""
        if self._sequences is None:
            if fields.get("queue") is not None:
                return False
            if not (fields.get("sharding_key") or fields.get("key") or isinstance(body, Message)):
                return False
            if isinstance(body, Message) and not body.sharding_key:
                return False
        return not self._lanes.routes.fresh(topic)

    def _check_may_wait(self) -> None:
        if self._lanes.in_pump():
            raise CommitMQError("a callback of a send must not wait for a send; use send_async")

    def _compressed(self, body: bytes) -> tuple[bytes, int]:
        """``body`` as it is stored, and the sysFlag bits of its compression."""
        if self._compress is None or len(body) <= self._compress_over:
            return body, 0
        smaller = compress(body, self._compress)
        return (smaller, self._compress_flags) if len(smaller) < len(body) else (body, 0)

    def _submit(
        self,
        topic: str,
        body: bytes | Message,
        tags: str | None,
        keys: Keys | None,
        properties: Mapping[str, str] | None,
        sharding_key: str | None,
        queue: int | None,
        flag: int,
        ack: str | None,
        asked: Asked | None,
        deadline: float,
    ) -> SendFuture:
        if isinstance(body, Message):
            check_alone(tags, keys, properties, sharding_key, None, flag)
            body, own, flag = content_of(body)
            sharding_key = own.get(Property.SHARDING_KEY)
            encoded = encode_user_properties(own)
        else:
            if type(body) is not bytes or not body:
                body = check_body(body)
            if tags is None and keys is None and properties is None and sharding_key is None:
                encoded = b""
            else:
                encoded = encode_user_properties(build_properties(tags, keys, properties, sharding_key))
        if asked is not None:
            encoded += asked.encoded
            check_properties_size(len(encoded))
        if flag:
            check_flag(flag)
        check_topic(topic)
        if self._sequences is not None:
            self._check_numbered(topic, queue, sharding_key, len(encoded), deadline)
        if queue is not None:
            queue = check_queue(queue)
        elif sharding_key:
            queue = self._queue_of_key(topic, body, sharding_key, deadline)
        sys_flag = 0
        if self._compress is not None:
            body, sys_flag = self._compressed(body)
        extras = (encoded, flag, sys_flag) if encoded or flag or sys_flag else None
        queue = -1 if queue is None else queue
        group = "" if asked is None else asked.key
        return self._outbox.submit(
            topic, queue, self._ack if ack is None else check_ack(ack), body, extras, deadline, group
        )

    def _check_numbered(
        self, topic: str, queue: int | None, sharding_key: str | None, properties_bytes: int, deadline: float
    ) -> None:
        assert self._sequences is not None
        check_properties_size(properties_bytes + MAX_MARK_BYTES)
        if queue is None and not sharding_key and not self._sequences.is_own:
            raise needs_queue()
        self._sequences.check()
        self._check_takes_numbers(topic, min(deadline, time.monotonic() + 1.0))

    def _check_takes_numbers(self, topic: str, deadline: float) -> None:
        if self._lanes.routes.is_memory(topic, deadline):
            raise InvalidMessageError(f"topic {topic!r} is kept in memory: memory topics take no idempotent sends")

    def _send_to_further_queues(
        self,
        topic: str,
        body: bytes | Message,
        tags: str | None,
        keys: Keys | None,
        properties: Mapping[str, str] | None,
        sharding_key: str | None,
        queue: int | None,
        flag: int,
        names: Iterable[str],
        deadline: float,
        ack: str | None,
    ) -> SendResult:
        """Send a message with ``multi_dispatch``, behind all earlier messages."""
        if self._sequences is not None:
            raise InvalidMessageError("an idempotent producer's messages cannot go to further queues")
        self._check_may_wait()
        if self._lanes.routes.is_memory(check_topic(topic), min(deadline, time.monotonic() + 1.0)):
            raise InvalidMessageError(f"topic {topic!r} is kept in memory: its messages cannot go to further queues")
        if isinstance(body, Message):
            check_alone(tags, keys, properties, sharding_key, None, flag)
            body, own, flag = content_of(body)
            sharding_key = own.get(Property.SHARDING_KEY)
        else:
            own = build_properties(tags, keys, properties, sharding_key)
            body = check_body(body)
        own[Property.INNER_MULTI_DISPATCH] = join_queue_names(names)
        own[Property.UNIQUE_KEY] = self._ids.next()
        body, sys_flag = self._compressed(body)
        if queue is None and sharding_key:
            queue = shard(sharding_key, self._lanes.routes.queues(topic, deadline))
        fields = {
            "v": wire.PROTOCOL_VERSION,
            "op": "send",
            "topic": check_topic(topic),
            "ack": self._ack if ack is None else check_ack(ack),
            "born": time.time_ns() // 1_000_000,
            "properties": own,
            "flag": check_flag(flag),
            "sys_flag": sys_flag,
            "queue": -1 if queue is None else check_queue(queue),
        }
        from commitmq.client.sending.lone import LoneMessage

        if self._lanes.all_in_flight():
            self._lanes.flush(deadline)
        lone = LoneMessage(self._lanes.writer, fields, body, deadline)
        self._lanes.writer.send_waiting(lone)
        return lone.wait()

    def _send_along(self, *arguments: Any) -> SendResult:
        """Send through the pump, and wait for the outcome.

        Others are sending, and to join their runs is faster than to take turns; or the message gets a number, which is the
        pump's task; or there is no connection at the moment, and the pump makes one.
        """
        self._check_usable()
        self._check_may_wait()
        deadline: float = arguments[-1]
        return self._wait_for(self._submit(*arguments), deadline)

    def _wait_for(self, future: SendFuture, deadline: float) -> SendResult:
        """The outcome of a message that the pump has."""
        try:
            # The pump fails it at its deadline. The further 0.25 s are for a pump that waits for a connection.
            return future.result_by(deadline + 0.25)
        except FutureTimeoutError:
            if future.done():
                return future.result(0)
            if future.cancel():
                raise not_stored("TIMEOUT", "other sends of this producer held its connection for too long") from None
            raise unknown("no answer in time", "TIMEOUT") from None
        except BaseException:
            future.cancel()
            raise
