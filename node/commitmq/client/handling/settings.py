"""The arguments of ``Consumer.run`` and ``AsyncConsumer.run`` that have the same type in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypedDict

from commitmq.client import checks
from commitmq.client.handling.consume_result import LONGEST_S, Backoff, check_backoff

DEFAULT_WORKERS: Final = 20
_MANY_WORKERS: Final = 10_000
_MEBIBYTE: Final = 1024 * 1024


class RunOptions(TypedDict, total=False):
    """How messages are handed to a handler; see :meth:`commitmq.Consumer.run`."""

    workers: int
    ordered: bool
    max_retries: int | None
    backoff: Backoff
    max_unfinished: int
    max_unfinished_bytes: int
    max_unfinished_span: int
    stop_timeout_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """:class:`RunOptions` with the defaults, which are RocketMQ's but for ``stop_timeout_s``."""

    workers: int = DEFAULT_WORKERS
    ordered: bool = False
    max_retries: int | None = 16
    backoff: Backoff = None
    max_unfinished: int = 1_000
    max_unfinished_bytes: int = 100 * _MEBIBYTE
    max_unfinished_span: int = 2_000
    stop_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ValueError for what is no setting."""
        for name in ("workers", "max_unfinished", "max_unfinished_bytes", "max_unfinished_span"):
            if checks.integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.workers > _MANY_WORKERS:
            raise ValueError(f"workers must be at most {_MANY_WORKERS}, not {self.workers}")
        if not isinstance(self.ordered, bool):
            raise ValueError(f"ordered must be True or False, not {self.ordered!r}")
        if self.max_retries is not None and checks.integer("max_retries", self.max_retries) < 0:
            raise ValueError(f"max_retries must not be below 0, not {self.max_retries}")
        checks.seconds("stop_timeout_s", self.stop_timeout_s, zero=True)
        object.__setattr__(self, "backoff", check_backoff(self.backoff, self.longest_delay_s))

    @property
    def longest_delay_s(self) -> float | None:
        """The longest delay of a message that is sent back; None in ordered mode, where the consumer itself waits."""
        return None if self.ordered else LONGEST_S
