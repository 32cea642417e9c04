"""What the node's own workers count. Times are counted in nanoseconds and shown in seconds.

The description of a metric that a worker counts: its name, kind, labels, and the bounds of a histogram.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``labels`` are names; each row of a table has a value for each.

    Rows hold whole numbers; what is shown is the number times ``scale``, so a histogram of seconds that counts nanoseconds
    has the scale 1e-9. ``bounds`` are the upper ends of a histogram's buckets, in the unit that is shown, ascending, without
    the last one (+Inf). A counter's name ends with ``_total``.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.kind is Kind.HISTOGRAM) != bool(self.bounds) or list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"{self.name}: a histogram, and nothing else, has bounds, in ascending order")
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters, and nothing else, end with _total")


def doubling(first: float, count: int) -> tuple[float, ...]:
    """``count`` bounds from ``first`` on, each twice the one before."""
    return tuple(first * (1 << step) for step in range(count))


_NS: Final = 1e-9
DURATIONS: Final = doubling(0.00005, 16)
"""50 us to 1.6 s."""
SIZES: Final = tuple(float(4096 << (2 * step)) for step in range(8))
"""4 KiB to 64 MiB."""
RUN_LENGTHS: Final = doubling(1.0, 15)
ROCKETMQ_MESSAGE_SIZES: Final = (1_024.0, 4_096.0, 524_288.0, 1_048_576.0, 2_097_152.0, 4_194_304.0)
LATENESS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0, 3_600.0)
ROCKETMQ_FINISH_TIMES: Final = (5.0, 60.0, 600.0, 3_600.0, 43_200.0, 86_400.0)

MESSAGES_IN: Final = Family(
    "commitmq_messages_in_total",
    Kind.COUNTER,
    "Messages stored, by the topic that they are stored in. Source: client, or node for those that the node itself moves.",
    ("topic", "source"),
)
BYTES_IN: Final = Family(
    "commitmq_bytes_in_total", Kind.COUNTER, "Bytes of the records of these messages.", ("topic", "source")
)
MESSAGE_SIZE: Final = Family(
    "commitmq_message_size_bytes",
    Kind.HISTOGRAM,
    "Size of a record; of a run of messages their mean, counted once.",
    ("topic",),
    ROCKETMQ_MESSAGE_SIZES,
)
APPEND_DURATION: Final = Family(
    "commitmq_append_duration_seconds",
    Kind.HISTOGRAM,
    "Time of a send in the writer until its messages are in the log; a wait for the device comes behind it.",
    ("kind",),
    DURATIONS,
    _NS,
)
APPEND_MESSAGES: Final = Family("commitmq_append_messages", Kind.HISTOGRAM, "Messages of one append.", (), RUN_LENGTHS)
SEND_DURATION: Final = Family(
    "commitmq_send_duration_seconds",
    Kind.HISTOGRAM,
    "Time of a send in the writer, from its reading to its answer.",
    ("ack",),
    DURATIONS,
    _NS,
)
SENDS_REFUSED: Final = Family(
    "commitmq_sends_refused_total", Kind.COUNTER, "Sends that the node refused, by the code of the answer.", ("code",)
)
SENDS_WAITING: Final = Family(
    "commitmq_sends_waiting", Kind.GAUGE, "Sends that wait for the device at the end of the writer's turn."
)
FLUSH_DURATION: Final = Family(
    "commitmq_flush_duration_seconds",
    Kind.HISTOGRAM,
    "Time of a sync of the log, by the process that made it.",
    ("by",),
    DURATIONS,
    _NS,
)
FLUSH_SIZE: Final = Family(
    "commitmq_flush_size_bytes", Kind.HISTOGRAM, "Bytes of the log that a sync made durable.", ("by",), SIZES
)
PULL_DURATION: Final = Family(
    "commitmq_pull_duration_seconds",
    Kind.HISTOGRAM,
    "Time that a reader worked on a pull, without the time that the pull waited for a message.",
    ("result",),
    DURATIONS,
    _NS,
)
PULLS_PARKED: Final = Family("commitmq_pulls_parked", Kind.GAUGE, "Pulls that wait for a message.")
PULLS_WOKEN: Final = Family("commitmq_pulls_woken", Kind.GAUGE, "Pulls that have messages and wait for their turn.")
MESSAGES_OUT: Final = Family(
    "commitmq_messages_out_total",
    Kind.COUNTER,
    "Messages handed to consumers, by topic and group; the group is empty for readers without one. Way: pull or pop.",
    ("topic", "group", "way"),
)
BYTES_OUT: Final = Family(
    "commitmq_bytes_out_total", Kind.COUNTER, "Bytes of the records of these messages.", ("topic", "group", "way")
)
DEAD_LETTERS: Final = Family(
    "commitmq_dead_letters_total",
    Kind.COUNTER,
    "Messages that became dead letters because a consumer sent them back once too often.",
    ("topic", "group"),
)
POP_IN_FLIGHT: Final = Family(
    "commitmq_pop_inflight_messages",
    Kind.GAUGE,
    "Messages that consumers which share queues have received and not acknowledged.",
    ("topic", "group"),
)
SET_ASIDE: Final = Family(
    "commitmq_messages_set_aside_total",
    Kind.COUNTER,
    "Messages of which not even a dead letter fits, by the process that passed them; commitmq dlq stuck lists them.",
    ("process",),
)
TRANSACTIONS_OPEN: Final = Family(
    "commitmq_transactions_pending", Kind.GAUGE, "Transactions that nobody has ended yet."
)
TRANSACTIONS_ENDED: Final = Family(
    "commitmq_transactions_ended_total",
    Kind.COUNTER,
    "Transactions that ended, by topic. Outcome: commit or rollback.",
    ("topic", "outcome"),
)
TRANSACTION_TIME: Final = Family(
    "commitmq_transaction_duration_seconds",
    Kind.HISTOGRAM,
    "Time from the birth of a half message to its commit.",
    ("topic",),
    ROCKETMQ_FINISH_TIMES,
    1e-3,
)
DELAYED_IN: Final = Family(
    "commitmq_delayed_in_total", Kind.COUNTER, "Messages with a time of their own that the timer took in.", ("topic",)
)
DELAYED_OUT: Final = Family(
    "commitmq_delayed_out_total", Kind.COUNTER, "Messages with a time of their own that are done.", ("topic",)
)
DELAYED_WAITING: Final = Family(
    "commitmq_delayed_messages", Kind.GAUGE, "Messages that wait for their time, by topic.", ("topic",)
)
