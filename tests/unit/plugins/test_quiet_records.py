"""Goal: py4j's records beside the exception that it raises are no news, and its other records are.

Method: records that a module of py4j's name makes, through the loggers that it uses.
"""

from __future__ import annotations

import logging

import pytest

from commitmq_plugins.spark import quiet


def record(logger: str, message: str, path: str) -> logging.LogRecord:
    return logging.LogRecord(logger, logging.ERROR, path, 1, message, (), None)


@pytest.mark.parametrize("message", quiet._TOLD)
def test_what_the_exception_says_is_no_news(message: str) -> None:
    assert not quiet._is_news(record("root", message, "/lib/py4j/clientserver.py"))
    assert quiet._is_news(record("root", message, "/program/sends.py")), "a program's own words are its own"


def test_other_words_of_py4j_are_news() -> None:
    assert "Exception occurred while shutting down connection" in quiet._TOLD
    assert quiet._is_news(record("py4j.clientserver", "the JVM is gone", "/lib/py4j/clientserver.py"))
