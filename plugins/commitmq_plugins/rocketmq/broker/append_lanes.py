"""The two ways of a run to the writer: its local socket for a lone message, ZeroMQ for everything else.

A sender that waits for each answer is lone: nothing else is under way, and last time it was so too. Its message is sent at
once and by the quick way. With several senders a turn's messages are collected, which makes fewer and larger runs.

Runs reach the writer in the order in which they are handed over: while one is on the local socket, others wait for its
answer, and while any is with ZeroMQ, none takes the local socket.
"""

from __future__ import annotations

from typing import Any, Final

from commitmq_plugins.rocketmq.broker.local_line import LocalLine
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.node_line import Answer, Done, LineLostError

_TIMEOUT_S: Final = 15.0


class AppendLanes:
    """See the module."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._local: LocalLine = node.local_line()
        self._under_way = self._most = 0
        self._was_lone = self._is_local_busy = False
        self._held: list[tuple[str, str, dict[str, Any], Any, Done]] = []

    @property
    def is_lone(self) -> bool:
        """Whether the next message is to be handed over at once."""
        return self._was_lone and not self._under_way

    def on_behalf_of(self, op: str, user: str) -> dict[str, Any]:
        """What a run of a client of ``user`` carries, see :meth:`Node.on_behalf_of`."""
        return self._node.on_behalf_of(op, user)

    def hand_over(self, role: str, op: str, fields: dict[str, Any], run: Any, messages: int, done: Done) -> None:
        """Send a run with so many clients' messages to ``role``, the process of the topic; ``done`` gets its answer.

        ``op`` is append, or batch for a batch that is one record.
        """
        was_idle = not self._under_way
        self._under_way += messages
        self._most = max(self._most, self._under_way)

        def ended(answer: Answer | LineLostError) -> None:
            self._ended(messages)
            done(answer)

        if self._is_local_busy:
            self._held.append((role, op, fields, run, ended))
            return
        if was_idle and self._was_lone and messages == 1 and role == "writer" and op == "append":
            self._is_local_busy = self._local.call(op, fields, self._local_ended(ended), run, timeout_s=_TIMEOUT_S)
            if self._is_local_busy:
                return
        self._node.line(role).call(op, fields, ended, (run,), timeout_s=_TIMEOUT_S)

    def _local_ended(self, ended: Done) -> Done:
        def go_on(answer: Answer | LineLostError) -> None:
            self._is_local_busy = False
            held, self._held = self._held, []
            for role, op, fields, run, done in held:
                self._node.line(role).call(op, fields, done, (run,), timeout_s=_TIMEOUT_S)
            ended(answer)

        return go_on

    def _ended(self, messages: int) -> None:
        self._under_way -= messages
        if not self._under_way:
            self._was_lone, self._most = self._most == 1, 0
