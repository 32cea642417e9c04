"""Structured logs: one line per event, ``time level process message key=value …``, to standard error.

The library never prints. A program that uses the clients configures logging by itself, and its lines have the fields
too. A node's standard error is ``commitmq/node.log``, except with ``--verbose``. All its processes append to that file, each
line with one write. The supervisor gives a long file another name (:mod:`commitmq.supervision.supervisor`); the others see
that before their next line, and open the new file (:func:`follow`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

_MOST_CHARACTERS: Final = 4_096


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        tail = _tail(getattr(record, "fields", {}))
        process = record.name.removeprefix("commitmq.")
        head = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {process}"
        line = f"{head} {record.msg.sentence if isinstance(record.msg, _LoggedEvent) else record.getMessage()}{tail}"
        if record.exc_info:
            # One line per event: the traceback is kept, its line ends are not.
            line += " traceback=" + _quoted(self.formatException(record.exc_info))
        return line


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, message, and the fields; a field of such a name gets a ``_`` behind."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": record.name.removeprefix("commitmq."),
            "message": record.msg.sentence if isinstance(record.msg, _LoggedEvent) else record.getMessage(),
        }
        for key, value in getattr(record, "fields", {}).items():
            plain = _shortened(value if value is None or type(value) in (bool, int, float, str) else str(value))
            line[f"{key}_" if key in line else key] = plain
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False)
        return text if text.isprintable() else json.dumps(line)


FORMATS: Final[Mapping[str, type[logging.Formatter]]] = {"text": _Formatter, "json": _JsonFormatter}


class _StderrFile:
    """The log file that standard error of this process is, under its name ``path``; None when it is something else."""

    path: Path | None = None
    file: tuple[int, int] = (-1, -1)  # device and inode that standard error has


class _StderrHandler(logging.StreamHandler[Any]):
    def emit(self, record: logging.LogRecord) -> None:
        if _StderrFile.path is not None:
            with contextlib.suppress(OSError):
                _take_new_file(_StderrFile.path)
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written, on a full disk, is dropped: a traceback about it could not be written either."""


def follow(path: Path) -> None:
    """Let this process and its children follow ``path``, if its standard error is that file or an older one of it."""
    path = Path(os.path.realpath(path))
    with contextlib.suppress(OSError):
        # The kernel knows the present name of an open file, also after it was renamed or deleted.
        if os.readlink("/proc/self/fd/2").startswith(str(path)):
            _StderrFile.path = path


def is_followed() -> bool:
    """Whether standard error is a log file whose name this process follows."""
    return _StderrFile.path is not None


def _take_new_file(path: Path) -> None:
    """Make the file that is called ``path`` now the standard error, and the output if that was the same file."""
    try:
        named = path.stat()
    except FileNotFoundError:
        pass  # its name was just given away: the first process to write makes the new one
    else:
        if (named.st_dev, named.st_ino) == _StderrFile.file:
            return
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        own = [os.fstat(number) for number in (1, 2)]
        if (own[0].st_dev, own[0].st_ino) == (own[1].st_dev, own[1].st_ino):
            os.dup2(fd, 1)
        os.dup2(fd, 2)
        opened = os.fstat(fd)
    finally:
        os.close(fd)
    _StderrFile.file = opened.st_dev, opened.st_ino


def _tail(fields: Mapping[str, Any]) -> str:
    return "".join(f" {key}={_quoted(_shortened(value))}" for key, value in fields.items())


class _LoggedEvent:
    """The logged object. As text, the form in any other formatter's line, it includes its fields."""

    def __init__(self, sentence: str, fields: Mapping[str, Any]) -> None:
        self.sentence = sentence
        self.fields = fields

    def __str__(self) -> str:
        return self.sentence + _tail(self.fields)


def _quoted(value: Any) -> str:
    """``value`` for a line. What a terminal or an editor would obey, and what is no UTF-8, is escaped as in Python."""
    text = str(value)
    if text.isprintable():
        if text and not any(character in text for character in ' "=\\'):
            return text
        text = text.replace("\\", "\\\\")
    else:
        text = "".join(one if one.isprintable() and one != "\\" else repr(one)[1:-1] for one in text)
    return '"' + text.replace('"', '\\"') + '"'


def _shortened(value: Any) -> Any:
    """A value that a client may have chosen takes no more of the log than others do."""
    text = str(value)
    return value if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}… ({len(text)} characters)"


class Log:
    """A logger whose calls take key=value fields."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, message: str, **fields: Any) -> None:
        self._logger.debug(_LoggedEvent(message, fields), extra={"fields": fields})

    def info(self, message: str, **fields: Any) -> None:
        self._logger.info(_LoggedEvent(message, fields), extra={"fields": fields})

    def warning(self, message: str, **fields: Any) -> None:
        self._logger.warning(_LoggedEvent(message, fields), extra={"fields": fields})

    def error(self, message: str, **fields: Any) -> None:
        self._logger.error(_LoggedEvent(message, fields), extra={"fields": fields})

    def exception(self, message: str, **fields: Any) -> None:
        self._logger.error(_LoggedEvent(message, fields), extra={"fields": fields}, exc_info=True)


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
        self._kinds: dict[tuple[str, Any], list[float]] = {}  # begin of the period, lines in it, lines omitted

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


def configure(level: str = "INFO", form: str = "text") -> None:
    """Send this process's logs to standard error, in the form ``text`` or ``json``. Called by a process's entry point and
    again when its settings change, never by the library.
    """
    handler = _StderrHandler(sys.stderr)
    handler.setFormatter(FORMATS[form]())
    root = logging.getLogger("commitmq")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
