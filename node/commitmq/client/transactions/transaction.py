"""One transaction of a producer, synchronous and for asyncio.

An administrator's view of open transactions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any, Final, Self

from commitmq.client.results import SendResult
from commitmq.client.transactions.group import Content, TransactionGroup
from commitmq.client.transactions.half_message import TransactionState
from commitmq.errors import CommitMQError, ProtocolError
from commitmq.log import get_log

DECISIONS: Final = ("commit", "rollback")


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction without an end. ``topic`` and ``queue`` are those where a commit puts its message.

    ``group`` is that of the producers that the node asks, ``checks`` how often it has asked. ``born`` is in ms since 1970.
    ``queue_offset`` and ``physical_offset`` are those of the half message now; they change with each check.
    """

    topic: str
    queue: str
    group: str
    unique_id: str
    keys: str
    tags: str
    queue_offset: int
    physical_offset: int
    born: int
    age_ms: int
    checks: int
    body_bytes: int

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """From the node's answer, without fields that this version does not know."""
        return cls(**{one.name: answer[one.name] for one in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Asks the transaction process: operation and fields."""


def open_transactions(ask: Ask) -> Iterator[OpenTransaction]:
    """All open transactions, oldest first."""
    after: int | None = None
    seen: set[str] = set()  # one that a check puts back between two pages is on both
    while True:
        page = ask("transaction.list", {} if after is None else {"after": after})
        for one in map(OpenTransaction.of, page["transactions"]):
            if one.unique_id not in seen:
                seen.add(one.unique_id)
                yield one
        after = page["next"]
        if after is None:
            return


def resolve(ask: Ask, unique_id: str, decision: str) -> dict[str, Any]:
    """End the open transaction ``unique_id``. Raises ProtocolError when there is none."""
    if decision not in DECISIONS:
        raise ValueError(f"decision must be commit or rollback, not {decision!r}")
    found = next((one for one in open_transactions(ask) if one.unique_id == unique_id), None)
    if found is None:
        raise ProtocolError("TRANSACTION_ENDED", f"no open transaction has the id {unique_id!r}")
    place = {"queue_offset": found.queue_offset, "physical_offset": found.physical_offset}
    return ask("transaction.end", {**place, "decision": decision, "by_person": True})


_log = get_log("producer")


class _TransactionBase:
    """What both kinds share: the half message, and that the first decision counts."""

    def __init__(self, group: TransactionGroup, timeout_s: float, content: Content) -> None:
        self._group = group
        self._content = content
        self._timeout_s = timeout_s
        self._half: SendResult | None = None
        self.state: TransactionState | None = None
        """The decision; None while there is none."""
        self.committed: SendResult | None = None
        """Where the committed message lies."""

    @property
    def half(self) -> SendResult:
        """The result of the half message. Its ``unique_id`` names the transaction."""
        if self._half is None:
            raise CommitMQError("the transaction has not begun: it begins with its with block")
        return self._half

    @property
    def unique_id(self) -> str:
        """The transaction's name, for the record that a check looks for."""
        return self.half.unique_id

    def unknown(self) -> None:
        """Leave the transaction open: the node asks a producer of the group later."""
        if self.state is None:
            self._decide(TransactionState.UNKNOWN)
            self._group.trace_end(self.half, self._content, TransactionState.UNKNOWN)
        else:
            self._decide(TransactionState.UNKNOWN)

    def _begun(self, half: SendResult) -> None:
        self._half = half
        self._group.checks.begin(half.unique_id)

    def _decide(self, state: TransactionState) -> None:
        unique_id = self.unique_id
        self._group.check_process()
        if self.state is not None and self.state is not state:
            raise CommitMQError(f"the transaction has ended already: {self.state.value}")
        self.state = state
        self._group.checks.decide(unique_id, state)

    def _send_end(self, state: TransactionState) -> Future[dict[str, Any]]:
        self._decide(state)
        return self._group.end(self.half, state, time.monotonic() + self._timeout_s)

    def _note(self, state: TransactionState, answer: dict[str, Any]) -> None:
        self._group.checks.settle(self.unique_id)
        if state is TransactionState.COMMIT:
            self.committed = committed_result(self.half, answer)
        self._group.trace_end(self.half, self._content, state)


class Transaction(_TransactionBase):
    """A message that others see only if its block succeeds: ``with producer.transaction(topic, body) as transaction``.

    The block begins when the node keeps the message, and the node shows it to nobody. It is committed at the end of the
    block, and rolled back when the block raises. ``commit``, ``rollback`` and ``unknown`` end it earlier; the
    first of them counts.

    A commit that raises SendError with the outcome UNKNOWN may be done. The node asks a producer of the group about a
    transaction without an end, so a program that must not lose one gives its producer a ``transaction_listener``.
    """

    def __init__(
        self, group: TransactionGroup, timeout_s: float, send: Callable[[], SendResult], content: Content
    ) -> None:
        super().__init__(group, timeout_s, content)
        self._send = send

    def commit(self) -> SendResult:
        """Let others see the message; returns where it lies. Raises SendError."""
        answer = self._send_end(TransactionState.COMMIT).result()
        self._note(TransactionState.COMMIT, answer)
        assert self.committed is not None
        return self.committed

    def rollback(self) -> None:
        """Let nobody ever see the message. Raises SendError."""
        self._note(TransactionState.ROLLBACK, self._send_end(TransactionState.ROLLBACK).result())

    def __enter__(self) -> Self:
        self._begun(self._send())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.state is not None:
            return
        if kind is None:
            self.commit()
            return
        try:
            self.rollback()
        except CommitMQError as problem:  # the error of the block is more important
            _warn(self.unique_id, problem)


class AsyncTransaction(_TransactionBase):
    """:class:`Transaction` for asyncio: ``async with producer.transaction(topic, body) as transaction``."""

    def __init__(
        self,
        group: TransactionGroup,
        timeout_s: float,
        send: Callable[[], asyncio.Future[SendResult]],
        content: Content,
    ) -> None:
        super().__init__(group, timeout_s, content)
        self._send = send

    async def commit(self) -> SendResult:
        """See :meth:`Transaction.commit`."""
        answer = await asyncio.wrap_future(self._send_end(TransactionState.COMMIT))
        self._note(TransactionState.COMMIT, answer)
        assert self.committed is not None
        return self.committed

    async def rollback(self) -> None:
        """See :meth:`Transaction.rollback`."""
        self._note(TransactionState.ROLLBACK, await asyncio.wrap_future(self._send_end(TransactionState.ROLLBACK)))

    async def __aenter__(self) -> Self:
        self._begun(await self._send())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.state is not None:
            return
        if kind is None:
            await self.commit()
            return
        try:
            await self.rollback()
        except CommitMQError as problem:
            _warn(self.unique_id, problem)


def committed_result(half: SendResult, answer: dict[str, Any]) -> SendResult:
    """Where a committed message lies. -1 stands for what the node does not remember: it knew the end already."""
    physical = int(answer.get("physical_offset", -1))
    return half._replace(
        queue=int(answer.get("queue", half.queue)),
        queue_offset=int(answer.get("queue_offset", -1)),
        physical_offset=physical,
        msg_id=f"{half.msg_id[:-16]}{physical:016X}" if physical >= 0 else "",
        stored_topic=answer.get("stored_topic"),
        ack="flushed",
    )


def _warn(unique_id: str, problem: CommitMQError) -> None:
    _log.warning("a transaction could not be rolled back; the node will ask", unique_id=unique_id, error=str(problem))
