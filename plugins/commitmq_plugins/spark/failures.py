"""What Spark raises, as the error of ours that was behind it.

An error in a task reaches the driver as text: a Java exception that quotes a Python traceback, sometimes several times.
"""

from __future__ import annotations

import re
from typing import Final

from commitmq import errors
from commitmq.errors import CommitMQError, ConfigError

_RAISED: Final = re.compile(r"^(?:[\w.]*\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)
_LONGEST: Final = 2000


class SparkJobError(CommitMQError):
    """A job failed for a reason of Spark's; the sentence is Spark's own."""


def plain(error: Exception) -> CommitMQError:
    """The CommitMQError that made ``error``, with its sentence, if it was one; else a SparkJobError."""
    text = str(error)
    for name, sentence in reversed(_RAISED.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, CommitMQError):
            # Errors with more than a sentence cannot be made again from text; their family can.
            return _again(kind, sentence)
    raised = _RAISED.search(text)
    return SparkJobError(raised.group(0) if raised else text.strip()[:_LONGEST])


def _again(kind: type[CommitMQError], sentence: str) -> CommitMQError:
    if issubclass(kind, errors.StoreError):
        return errors.StoreError(sentence)
    if issubclass(kind, ConfigError):
        return ConfigError(sentence)
    if issubclass(kind, errors.NodeUnavailableError):
        return errors.NodeUnavailableError(sentence.removeprefix("NODE_UNAVAILABLE: "))
    return CommitMQError(sentence)
