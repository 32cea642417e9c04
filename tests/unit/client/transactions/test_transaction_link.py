"""Goal: an end of a transaction gets an answer or an error in time, whatever happens in the connection's thread.

Method: a link whose turns fail with an error that nobody expects.
"""

from __future__ import annotations

import time

import pytest

from commitmq.client.transactions.link import TransactionLink
from commitmq.errors import Outcome, SendError


class FailingLink(TransactionLink):
    """Every turn fails, behind its look at what is overdue."""

    def _turn(self) -> None:
        self._take_new()
        self._expire(time.monotonic())
        time.sleep(0.01)
        raise RuntimeError("can't start new thread")


def test_an_unexpected_error_leaves_no_end_waiting() -> None:
    link = FailingLink("tcp://127.0.0.1:1", "group", lambda _: None)
    first = link.end({"decision": "commit"}, time.monotonic() + 0.1)
    with pytest.raises(SendError) as raised:
        first.result(5)
    assert raised.value.outcome is Outcome.UNKNOWN
    second = link.end({"decision": "commit"}, time.monotonic() + 0.1)
    assert isinstance(second.exception(5), SendError), "the thread goes on"
    link.close(5)
    assert isinstance(link.end({}, time.monotonic()).exception(5), SendError)
