"""What Spark raises, as the error of ours that was behind it.

An error of the source reaches the driver as text: a Java exception that quotes a Python traceback, sometimes several times.
Its last line has our sentence. :func:`plain` makes the error of ours from it again; :func:`tell_plainly` lets Spark's own
exceptions be no more than the sentence.
"""

from __future__ import annotations

import re
from typing import Any, Final

from commitmq import errors
from commitmq.errors import CommitMQError, ConfigError

_RAISED: Final = re.compile(r"^((?:[\w.]*\.)?)(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)
_FRAME: Final = re.compile(r'^ *File "(.+)", line \d+', re.MULTILINE)
_OURS: Final = ("commitmq.", "commitmq_plugins.")
_LONGEST: Final = 2000


class SparkJobError(CommitMQError):
    """A job failed for a reason of Spark's; the sentence is Spark's own."""


def plain(error: Exception) -> CommitMQError:
    """The CommitMQError that made ``error``, with its sentence, if it was one; else a SparkJobError."""
    told = getattr(error, "commitmq_error", None)
    if isinstance(told, CommitMQError):
        return told
    text = str(error)
    found = _of_ours(text)
    if found is not None:
        return found
    raised = _RAISED.search(text)
    return SparkJobError(raised.group(0) if raised else text.strip()[:_LONGEST])


def tell_plainly() -> None:
    """From now on an exception of Spark's for an error of the source or a sink has only our sentence as its text.

    Its class is Spark's still, a PythonException where Spark has no class for it; ``commitmq_error`` is the error of ours.
    Errors in Python code of the program itself stay as they are, with their tracebacks. This is done where pyspark makes
    Python exceptions of Java's; if a later pyspark has no such place, nothing changes.
    """
    from pyspark.errors.exceptions import captured

    original: Any = getattr(captured, "convert_exception", None)
    if original is None or getattr(original, "is_plain", False):
        return

    def convert_exception(error: Any) -> Any:
        converted = original(error)
        text = f"{converted._desc or ''}\n{converted if isinstance(converted, captured.PythonException) else ''}"
        frame = next((one for one in _FRAME.findall(text) if "/pyspark/" not in one), "")
        found = _of_ours(text)
        if found is None or "/commitmq_plugins/spark/" not in frame:
            return converted
        if isinstance(converted, captured.UnknownException | captured.PythonException):
            # Without its origin in Java: a PythonException with one writes the whole traceback.
            converted = captured.PythonException(desc=str(found), stackTrace=converted._stackTrace)
        converted._desc = str(found)
        converted.commitmq_error = found
        return converted.with_traceback(None)

    convert_exception.is_plain = True  # type: ignore[attr-defined]
    captured.convert_exception = convert_exception  # type: ignore[assignment]


def _of_ours(text: str) -> CommitMQError | None:
    """The last error of ours that ``text`` quotes, made again."""
    for module, name, sentence in reversed(_RAISED.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, CommitMQError):
            # Errors with more than a sentence cannot be made again from text; their family can.
            return _again(kind, sentence)
        if module.startswith(_OURS):
            return CommitMQError(sentence)
    return None


def _again(kind: type[CommitMQError], sentence: str) -> CommitMQError:
    if issubclass(kind, errors.StoreError):
        return errors.StoreError(sentence)
    if issubclass(kind, ConfigError):
        return ConfigError(sentence)
    if issubclass(kind, errors.NodeUnavailableError):
        return errors.NodeUnavailableError(sentence.removeprefix("NODE_UNAVAILABLE: "))
    return CommitMQError(sentence)
