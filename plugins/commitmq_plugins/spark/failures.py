"""Converts Spark's exceptions back into the CommitMQError that caused them.

An error of the source reaches the driver as text: a Java exception that quotes a Python traceback, sometimes several
times. Its last line has CommitMQ's sentence. :func:`plain` restores the CommitMQError from it; :func:`tell_plainly`
reduces the text of Spark's own exceptions to that sentence.
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
    """A job failed for a reason of Spark; the sentence is Spark's own."""


def plain(error: Exception) -> CommitMQError:
    """The CommitMQError that caused ``error``, with its sentence, if there is one; else a SparkJobError."""
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
    """From now on a Spark exception for an error of the source or a sink has only CommitMQ's sentence as its text.

    Its class stays Spark's, a PythonException where Spark has no class for it; ``commitmq_error`` is the CommitMQError.
    Errors in Python code of the program itself keep their tracebacks. The change is made where pyspark converts Java's
    exceptions to Python's; if a later pyspark has no such place, nothing changes.
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
            # Drop its Java exception: a PythonException with one writes the whole traceback.
            converted = captured.PythonException(desc=str(found), stackTrace=converted._stackTrace)
        converted._desc = str(found)
        converted.commitmq_error = found
        return converted.with_traceback(None)

    convert_exception.is_plain = True  # type: ignore[attr-defined]
    captured.convert_exception = convert_exception  # type: ignore[assignment]


def _of_ours(text: str) -> CommitMQError | None:
    """The last CommitMQError that ``text`` quotes, restored."""
    for module, name, sentence in reversed(_RAISED.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, CommitMQError):
            # Errors with more than a sentence cannot be restored from text; a base class of theirs can.
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
