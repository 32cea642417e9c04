"""The methods of a producer for transactions."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

from commitmq.client.message import Message, content_of
from commitmq.client.producer_base import ProducerBase
from commitmq.client.properties import both_keys, build_properties
from commitmq.client.results import SendResult
from commitmq.client.sending.options import HalfOptions, MessageOptions
from commitmq.client.sending.send_future import SendFuture
from commitmq.errors import InvalidMessageError

if TYPE_CHECKING:
    from commitmq.client.transactions.group import TransactionGroup
    from commitmq.client.transactions.half_message import TransactionResult
    from commitmq.client.transactions.transaction import Transaction


class TransactionProducer(ProducerBase):
    """A part of :class:`commitmq.Producer`."""

    def transaction(self, topic: str, body: bytes | Message, **fields: Unpack[MessageOptions]) -> Transaction:
        """A message that others see only if the block of a ``with`` succeeds; ``fields`` as in :meth:`send`.

        The producer needs a ``group``. See :class:`commitmq.Transaction`. A ``delay`` begins with the commit.
        """
        from commitmq.client.transactions.transaction import Transaction

        group = self._transaction_group()
        limit = self._limit(fields.get("timeout_s"))
        return Transaction(
            group, limit, partial(self._send_half, topic, body, fields), partial(content_for_listener, body, fields)
        )

    def send_in_transaction(
        self, topic: str, body: bytes | Message, argument: Any = None, **fields: Unpack[MessageOptions]
    ) -> TransactionResult:
        """Send a half message, call the listener's ``execute(message, argument)``, and end the transaction as it says.

        With UNKNOWN, and when ``execute`` raises, the transaction stays open: the node asks later. Raises what ``execute``
        raises, SendError, and InvalidMessageError without a listener that has ``execute``.
        """
        from commitmq.client.transactions.half_message import TransactionResult, TransactionState

        group = self._transaction_group()
        group.check_executes()
        with self.transaction(topic, body, **fields) as transaction:
            try:
                state = group.execute(transaction.half, *content_for_listener(body, fields), argument)
            except BaseException:
                transaction.unknown()
                raise
            if state is TransactionState.COMMIT:
                transaction.commit()
            elif state is TransactionState.ROLLBACK:
                transaction.rollback()
            else:
                transaction.unknown()
        return TransactionResult(transaction.half, state, transaction.committed)

    def _transaction_group(self) -> TransactionGroup:
        self._check_usable()
        if self._transactions is None:
            raise InvalidMessageError(
                "a transaction needs Producer(group=…): the node asks a producer of the group about it"
            )
        if self._sequences is not None:
            raise InvalidMessageError("an idempotent producer's messages cannot be part of a transaction")
        return self._transactions

    def _send_half(self, topic: str, body: bytes | Message, fields: MessageOptions) -> SendResult:
        """Send a half message, and wait until the node keeps it."""
        self._check_may_wait()
        deadline = time.monotonic() + self._limit(fields.get("timeout_s"))
        return self._wait_for(self._submit_half(topic, body, self._half_options(fields), deadline), deadline)

    def _half_options(self, fields: MessageOptions) -> HalfOptions:
        """``fields`` with what the half message asks of the node. Raises InvalidMessageError."""
        delay, level, at = fields.get("delay"), fields.get("delay_level"), fields.get("deliver_at")
        later = None if delay is None and level is None and at is None else self._asked(delay, level, at)
        plain = {name: value for name, value in fields.items() if name not in ("delay", "delay_level", "deliver_at")}
        return cast(HalfOptions, {**plain, "half": self._transaction_group().asked(later)})

    def _submit_half(
        self, topic: str, body: bytes | Message, fields: HalfOptions, deadline: float | None = None
    ) -> SendFuture:
        """Give a half message to the pump. Raises InvalidMessageError, NoRoom."""
        self._check_usable()
        keys, sharding_key = fields.get("keys"), fields.get("sharding_key")
        if (key := fields.get("key")) is not None:
            keys, sharding_key = both_keys(key, keys, sharding_key)
        if deadline is None:
            deadline = time.monotonic() + self._limit(fields.get("timeout_s"))
        return self._submit(
            topic,
            body,
            fields.get("tags"),
            keys,
            fields.get("properties"),
            sharding_key,
            fields.get("queue"),
            fields.get("flag", 0),
            fields.get("ack"),
            fields["half"],
            deadline,
        )


def content_for_listener(body: bytes | Message, fields: MessageOptions) -> tuple[bytes, dict[str, str]]:
    """Body and properties of a message, as a listener gets them."""
    if isinstance(body, Message):
        content, own, _ = content_of(body)
        return content, own
    keys, sharding_key = fields.get("keys"), fields.get("sharding_key")
    if (key := fields.get("key")) is not None:
        keys, sharding_key = both_keys(key, keys, sharding_key)
    return body, build_properties(fields.get("tags"), keys, fields.get("properties"), sharding_key)
