"""Flow control of a process that serves clients: the rates of ``[flow]``.

A refusal has the code ``SYSTEM_BUSY``, the reason, and ``retry_after_ms``; nothing is stored or read then. The work is per
request, never per message; with all rates off there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from commitmq.semantics.rates import RateLimiter
from commitmq.workers.runtime.context import Refusals, WorkerContext

MAX_NAME_CHARACTERS: Final = 255
_BUSY: Final = "SYSTEM_BUSY"
_DRAINED_MS: Final = 1_000


class FlowRefusedError(Exception):
    """A request over a rate. ``retry_after_ms``: when it may pass."""

    def __init__(self, sentence: str, retry_after_ms: int, code: str = _BUSY) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code
        self.retry_after_ms = retry_after_ms


class Flow:
    """The rates of one process. With new settings or quotas it continues from the one ``before``."""

    def __init__(self, context: WorkerContext, rates: list[RateLimiter]) -> None:
        self._refusals, self._rates = Refusals(context.control, context.slot), rates
        self.bounds_users = any(one.is_bounded for one in rates if one.kind == "user")
        """Whether the user of a request has to be known."""

    @classmethod
    def of_sends(cls, context: WorkerContext, before: Flow | None = None) -> Flow | None:
        """The rates of sends: names are (client, topic, user). None where all are off."""
        flow, quotas = context.config.flow, context.quotas
        if flow.refuse_sends:
            return NoSends(context, [])
        return cls._of(
            context,
            before,
            quotas.sends if quotas.bounds_sends else None,
            ("client", flow.client_send_messages_per_s, flow.client_send_bytes_per_s),
            ("topic", flow.topic_send_messages_per_s, flow.topic_send_bytes_per_s),
        )

    @classmethod
    def of_pulls(cls, context: WorkerContext, before: Flow | None = None) -> Flow | None:
        """The rates of pulls: names are (client, topic, group, user). None where all are off."""
        flow, quotas = context.config.flow, context.quotas
        return cls._of(
            context,
            before,
            quotas.pulls if quotas.bounds_pulls else None,
            ("client", flow.client_pull_messages_per_s, flow.client_pull_bytes_per_s),
            ("topic", flow.topic_pull_messages_per_s, flow.topic_pull_bytes_per_s),
            ("group", flow.group_pull_messages_per_s, flow.group_pull_bytes_per_s),
        )

    @classmethod
    def _of(
        cls,
        context: WorkerContext,
        before: Flow | None,
        of_user: Callable[[object], tuple[int, int]] | None,
        *kinds: tuple[str, int, int],
    ) -> Flow | None:
        limit = context.config.flow.max_buckets
        rates = [*(RateLimiter(*kind, limit) for kind in kinds), RateLimiter("user", 0, 0, limit, of_user)]
        for one, old in zip(rates, before._rates if before is not None else (), strict=False):
            one.continue_from(old)
        return cls(context, rates) if any(one.is_bounded for one in rates) else None

    def admit(self, *names: object) -> None:
        """Raise FlowRefusedError when one of ``names`` is over its rate. A name None is bounded by none."""
        now_s = time.monotonic()
        for rates, name in zip(self._rates, names, strict=True):
            if name is not None and rates.is_bounded and (wait_ms := rates.wait_ms(_short(name), now_s)):
                self._refusals.count()
                shown = "of this connection" if rates.kind == "client" else repr(name)
                raise FlowRefusedError(f"{rates.sentence(_short(name), shown)} ([flow])", wait_ms)

    def take(self, messages: int, size_bytes: int, *names: object) -> None:
        """Take the cost of a request that passed :meth:`admit`."""
        now_s = time.monotonic()
        for rates, name in zip(self._rates, names, strict=True):
            if name is not None and rates.is_bounded:
                rates.take(_short(name), messages, size_bytes, now_s)


class NoSends(Flow):
    """``flow.refuse_sends``: no send of a client passes."""

    def admit(self, *_names: object) -> None:
        """Raise FlowRefusedError. It is not counted: the count is of requests over a rate."""
        sentence = "the node takes no sends for now (flow.refuse_sends; `commitmq drain off`)"
        raise FlowRefusedError(sentence, _DRAINED_MS, "SERVICE_NOT_AVAILABLE")


def _short(name: object) -> object:
    """``name`` with at most the characters of a group's name: the readers know no groups, and take every name."""
    return name[:MAX_NAME_CHARACTERS] if type(name) is str else name
