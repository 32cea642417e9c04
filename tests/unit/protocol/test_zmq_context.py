"""Goal: the clients of a process share one ZeroMQ context, and a forked child is refused those of its parent.

Method: takers of the context in this process, and the id of another process.
"""

from __future__ import annotations

import os

import pytest

from commitmq import CommitMQError
from commitmq.protocol import channel
from commitmq.protocol.channel import acquire_context, check_fork, release_context


def test_the_last_client_ends_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests' clients that were interrupted inside of a call live until the garbage collector finds them.
    monkeypatch.setattr(channel, "_context", None)
    monkeypatch.setattr(channel, "_context_users", 0)
    first = acquire_context()
    assert acquire_context() is first
    release_context()
    assert not first.closed
    release_context()
    assert first.closed


def test_a_fork_is_told_what_to_do() -> None:
    check_fork(os.getpid(), "producer")
    with pytest.raises(CommitMQError, match="Make a new producer in the child"):
        check_fork(os.getpid() + 1, "producer")
