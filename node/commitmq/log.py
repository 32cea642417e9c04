"""Structured logs: one line per event, ``time level process message key=value …``, to standard error.

The library never prints. A program that uses the clients configures logging by itself, and its lines have the fields
too. The supervisor points standard error of all processes at ``run/../commitmq/node.log`` when a node runs in the
background.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        tail = _tail(getattr(record, "fields", {}))
        process = record.name.removeprefix("commitmq.")
        head = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {process}"
        line = f"{head} {record.msg.sentence if isinstance(record.msg, _Event) else record.getMessage()}{tail}"
        if record.exc_info:
            # One line per event: the traceback is kept, its line ends are not.
            line += " traceback=" + _quoted(self.formatException(record.exc_info))
        return line


def _tail(fields: Mapping[str, Any]) -> str:
    return "".join(f" {key}={_quoted(value)}" for key, value in fields.items())


class _Event:
    """The logged object. As text, the form in any other formatter's line, it includes its fields."""

    def __init__(self, sentence: str, fields: Mapping[str, Any]) -> None:
        self.sentence = sentence
        self.fields = fields

    def __str__(self) -> str:
        return self.sentence + _tail(self.fields)


def _quoted(value: Any) -> str:
    text = str(value)
    if text and not any(character in text for character in ' "=\n\t\\'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


class Log:
    """A logger whose calls take key=value fields."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, message: str, **fields: Any) -> None:
        self._logger.debug(_Event(message, fields), extra={"fields": fields})

    def info(self, message: str, **fields: Any) -> None:
        self._logger.info(_Event(message, fields), extra={"fields": fields})

    def warning(self, message: str, **fields: Any) -> None:
        self._logger.warning(_Event(message, fields), extra={"fields": fields})

    def error(self, message: str, **fields: Any) -> None:
        self._logger.error(_Event(message, fields), extra={"fields": fields})

    def exception(self, message: str, **fields: Any) -> None:
        self._logger.error(_Event(message, fields), extra={"fields": fields}, exc_info=True)


class LimitedLog(Log):
    """A log for what strangers can cause: at most ``most`` lines of one message and ``code`` in ``period_s`` seconds.

    The next line of that message says how many were ``left_out``. Texts are cut after 500 characters. Debug lines have no
    limit.
    """

    _MOST_KINDS = 1_000
    _MOST_CHARACTERS = 500

    def __init__(
        self, log: Log, *, most: int = 10, period_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(log._logger)
        self._most, self._period_s, self._clock = most, period_s, clock
        self._kinds: dict[tuple[str, Any], list[float]] = {}  # begin of the period, lines in it, lines left out

    def info(self, message: str, **fields: Any) -> None:
        if self._passes(message, fields):
            super().info(message, **fields)

    def warning(self, message: str, **fields: Any) -> None:
        if self._passes(message, fields):
            super().warning(message, **fields)

    def error(self, message: str, **fields: Any) -> None:
        if self._passes(message, fields):
            super().error(message, **fields)

    def exception(self, message: str, **fields: Any) -> None:
        if self._passes(message, fields):
            super().exception(message, **fields)

    def _passes(self, message: str, fields: dict[str, Any]) -> bool:
        now = self._clock()
        key = message, fields.get("code")
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= self._MOST_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = [now, 0, 0]
        elif now - kind[0] >= self._period_s:
            kind[:2] = now, 0
        if kind[1] >= self._most:
            kind[2] += 1
            return False
        kind[1] += 1
        for name, value in fields.items():
            if type(value) is str and len(value) > self._MOST_CHARACTERS:
                fields[name] = value[: self._MOST_CHARACTERS] + "…"
        if kind[2]:
            fields["left_out"] = int(kind[2])
            kind[2] = 0
        return True


def get_log(process: str) -> Log:
    """The log of one process (``writer``, ``flush`` …) or library part."""
    return Log(logging.getLogger(f"commitmq.{process}"))


def configure(level: str = "INFO") -> None:
    """Send this process's logs to standard error. Called once by a process's entry point, never by the library."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    root = logging.getLogger("commitmq")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
