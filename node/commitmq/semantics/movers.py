"""The movers: the processes that take messages from a topic of the node to where they belong, and who calls for one.

A mover starts when it is needed first, and then runs as long as its node. So a node that has no message for it pays
neither its memory nor its processor time. The ConsumeQueue dispatcher calls for a mover when it sees a topic of the mover:
its folder when the dispatcher opens, or a message in a batch. A client can call for one too, with the request
``mover.start``: it needs the process before the first message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.pop_revive import REVIVE_TOPIC_PREFIX
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import HALF_TOPIC


@dataclass(frozen=True, slots=True)
class MoverRole:
    """One process. ``prefix``: the names of its topics begin so. ``bit``: its bit of the word MOVERS_WANTED."""

    role: str
    module: str
    prefix: str
    bit: int


MOVERS: Final = (
    MoverRole("schedule", "commitmq.workers.schedule.process", SCHEDULE_TOPIC, 1),
    MoverRole("timer", "commitmq.workers.timer.process", TIMER_TOPIC, 2),
    MoverRole("pop", "commitmq.workers.pop.process", REVIVE_TOPIC_PREFIX, 8),
    MoverRole("transaction", "commitmq.workers.transaction.process", HALF_TOPIC, 4),
)

ROLES: Final = frozenset(mover.role for mover in MOVERS)
_PREFIXES: Final = tuple(mover.prefix for mover in MOVERS)


def wanted_by(topics: Iterable[str]) -> int:
    """The bits of the movers whose topics are among ``topics``."""
    bits = 0
    for topic in topics:
        if topic.startswith(_PREFIXES):
            for mover in MOVERS:
                bits |= mover.bit if topic.startswith(mover.prefix) else 0
    return bits


def wanted_by_folders(queues: Path) -> int:
    """The bits of the movers that have queues in the folder ``queues`` (a store's ``consumequeue``)."""
    bits = 0
    for mover in MOVERS:
        if next(queues.glob(f"{mover.prefix}*"), None) is not None:
            bits |= mover.bit
    return bits
