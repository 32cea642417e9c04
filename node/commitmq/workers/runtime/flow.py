"""Flow control of a process that serves clients: the rates of ``[flow]``, and how many requests ``[flow]`` refused.

A refusal has the code ``SYSTEM_BUSY``, the reason, and ``retry_after_ms``; nothing is stored or read then. The work is per
request, never per message; with all rates off there is none.
"""

from __future__ import annotations

import time
from typing import Final

from commitmq.config.schema import FlowConfig
from commitmq.control import WorkerWord
from commitmq.semantics.rates import Rates
from commitmq.workers.runtime.context import WorkerContext

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


class Refusals:
    """Counts what a process refused; its predecessor's refusals count too."""

    def __init__(self, context: WorkerContext) -> None:
        self._control, self._slot = context.control, context.slot

    def count(self) -> None:
        """One more."""
        refused = self._control.worker(self._slot, WorkerWord.REFUSED)
        self._control.put_worker(self._slot, WorkerWord.REFUSED, refused + 1)


class Flow:
    """The rates of one process."""

    def __init__(self, context: WorkerContext, kinds: tuple[tuple[str, int, int], ...]) -> None:
        self._refusals = Refusals(context)
        limit = context.config.flow.max_buckets
        self._rates = [Rates(kind, messages, size, limit) for kind, messages, size in kinds]

    @classmethod
    def of_sends(cls, context: WorkerContext) -> Flow | None:
        """The rates of sends: names are (client, topic). None where all are off."""
        flow = context.config.flow
        if flow.refuse_sends:
            return NoSends(context, ())
        return cls._of(
            context,
            ("client", flow.client_send_messages_per_s, flow.client_send_bytes_per_s),
            ("topic", flow.topic_send_messages_per_s, flow.topic_send_bytes_per_s),
        )

    @classmethod
    def of_pulls(cls, context: WorkerContext) -> Flow | None:
        """The rates of pulls: names are (client, topic, group). None where all are off."""
        flow: FlowConfig = context.config.flow
        return cls._of(
            context,
            ("client", flow.client_pull_messages_per_s, flow.client_pull_bytes_per_s),
            ("topic", flow.topic_pull_messages_per_s, flow.topic_pull_bytes_per_s),
            ("group", flow.group_pull_messages_per_s, flow.group_pull_bytes_per_s),
        )

    @classmethod
    def _of(cls, context: WorkerContext, *kinds: tuple[str, int, int]) -> Flow | None:
        return cls(context, kinds) if any(messages or size for _, messages, size in kinds) else None

    def admit(self, *names: object) -> None:
        """Raise FlowRefusedError when one of ``names`` is over its rate. A name None is bounded by none."""
        now_s = time.monotonic()
        for rates, name in zip(self._rates, names, strict=True):
            if name is not None and rates.is_bounded and (wait_ms := rates.wait_ms(_short(name), now_s)):
                self._refusals.count()
                shown = "of this connection" if rates.kind == "client" else repr(name)
                raise FlowRefusedError(f"{rates.sentence(shown)} ([flow])", wait_ms)

    def take(self, messages: int, size_bytes: int, *names: object) -> None:
        """Take the cost of a request that passed :meth:`admit`."""
        now_s = time.monotonic()
        for rates, name in zip(self._rates, names, strict=True):
            if name is not None and rates.is_bounded:
                rates.take(_short(name), messages, size_bytes, now_s)


class NoSends(Flow):
    """``flow.refuse_sends``: no send of a client passes."""

    def admit(self, *_names: object) -> None:
        """Raise FlowRefusedError."""
        self._refusals.count()
        sentence = "the node takes no sends for now (flow.refuse_sends; `commitmq drain off`)"
        raise FlowRefusedError(sentence, _DRAINED_MS, "SERVICE_NOT_AVAILABLE")


def _short(name: object) -> object:
    """``name`` with at most the characters of a group's name: the readers know no groups, and take every name."""
    return name[:MAX_NAME_CHARACTERS] if type(name) is str else name
