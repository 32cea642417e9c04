"""The rates of ``[flow]`` for receives of messages that a group shares: those of pulls, counted by this process."""

from __future__ import annotations

from typing import Any

from commitmq.errors import ProtocolError
from commitmq.security.audit import Actor
from commitmq.workers.pop.finder import Portion
from commitmq.workers.pop.parked_pops import Pop
from commitmq.workers.pop.shares import SHARE
from commitmq.workers.reader.answers import Answers
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.flow import Flow, FlowRefusedError


class PopRates:
    """``flow`` is None while all rates are off. While ``is_on`` is false, nothing is to be asked."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.flow: Flow | None = None
        self.is_on = False
        self._take_settings()
        context.on_settings(lambda _config: self._take_settings())

    def _take_settings(self) -> None:
        self.flow = Flow.of_pulls(self._context, self.flow)
        self.is_on = self.flow is not None or self._context.quotas.bounds_names

    def admit(self, pop: Pop, header: dict[str, Any], answers: Answers) -> None:
        """Learn whose rates hold. Raise ProtocolError SYSTEM_BUSY when the client, a topic, the group or the user is over its
        rate.

        A receive that waits for messages passes now; what it gets is taken from its rates when it gets it.
        """
        told = header.get("client")
        pop.owner = told if type(told) is str and answers.is_local(pop.client) else pop.client
        pop.user = answers.user_of(header)
        flow = self.flow
        if flow is None:
            return
        try:
            flow.admit(pop.owner, pop.topics[0], pop.group, pop.user)
            for topic in pop.topics[1:]:
                flow.admit(None, topic, None, None)
        except FlowRefusedError as refusal:
            raise ProtocolError(refusal.code, refusal.sentence, retry_after_ms=refusal.retry_after_ms) from refusal

    def on_behalf_of(self, pop: Pop) -> dict[str, Any]:
        """What a request to the coordinator carries, for which a group may be made by the receive."""
        return self._context.vouching.fields(SHARE, Actor(pop.user)) if pop.user else {}

    def take(self, flow: Flow, pop: Pop, portions: list[Portion]) -> None:
        """Take the cost of the messages that were handed out."""
        for one in portions:
            size_bytes = sum(map(len, one.frames))
            flow.take(len(one.offsets), size_bytes, pop.owner or pop.client, one.popped, pop.group, pop.user)
