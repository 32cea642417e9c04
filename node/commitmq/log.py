"""Structured logs: one line per event, ``time level process message key=value …``, to standard error.

The library never prints. A program that uses the clients configures logging by itself, and its lines have the fields
too. The supervisor points standard error of all processes at ``run/../commitmq/node.log`` when a node runs in the
background.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
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
