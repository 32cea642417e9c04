"""Goal: each code of a failure is one of the public Code's and on the page; errors say by their type what they are.

Method: the codes in PROTOCOL.md's table and in every call that makes an error (syntax trees), beside the enumeration.
"""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq.client.results import BatchSendError
from commitmq.errors import (
    Code,
    CommitMQError,
    ConfigError,
    CutRefusedError,
    FencedError,
    FilterError,
    MissingExtraError,
    NodeUnavailableError,
    Outcome,
    ProducerFencedError,
    ProtocolError,
    RequestError,
    SendError,
    StoreLockedError,
    TopicNotFoundError,
    send_error,
)
from commitmq.protocol import wire

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "node" / "commitmq" / "protocol" / "PROTOCOL.md"
# Whose first argument is a code.
MAKERS = {"ProtocolError", "SendError", "not_stored", "send_error", "_NoSuchQueueError"}
CLIENTS = {name for name in Code if name in ("NODE_UNAVAILABLE", "CONNECTION_LOST", "TIMEOUT", "BAD_ANSWER")} | {
    name for name in Code if name.startswith("CLIENT_") or name == "AUTHENTICATION_FAILED"
}


def codes_of_the_page() -> set[str]:
    table = PAGE.read_text().partition("### Codes")[2].partition("\n#")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {code for row in rows for code in re.findall(r"`([A-Z_]+)`", row)}


def codes_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            first = node.args[0]
            if name in MAKERS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def test_the_page_lists_the_nodes_codes() -> None:
    assert codes_of_the_page() == set(Code) - CLIENTS


def test_every_code_that_is_raised_is_a_public_one() -> None:
    found = {
        code
        for folder in ("node", "plugins", "dispatchers")
        for path in (PROJECT / folder).rglob("*.py")
        for code in codes_of(ast.parse(path.read_text()))
    }
    assert len(found) > 15
    assert found <= {*Code}, found - {*Code}


def test_an_unknown_code_would_be_seen() -> None:
    assert list(codes_of(ast.parse('raise ProtocolError("MADE_UP", "x")'))) == ["MADE_UP"]
    assert "MADE_UP" not in {*Code}


@pytest.mark.parametrize(
    ("code", "outcome", "kinds", "retryable"),
    [
        ("NODE_UNAVAILABLE", Outcome.NOT_STORED, {NodeUnavailableError}, True),
        ("CONNECTION_LOST", Outcome.UNKNOWN, {NodeUnavailableError}, False),
        ("TOPIC_NOT_EXIST", Outcome.NOT_STORED, {TopicNotFoundError, ProtocolError}, False),
        ("PRODUCER_FENCED", Outcome.NOT_STORED, {ProducerFencedError}, False),
        ("SYSTEM_BUSY", Outcome.NOT_STORED, set(), True),
        ("FLUSH_DISK_TIMEOUT", Outcome.STORED, set(), False),
        ("OF_A_NEWER_NODE", Outcome.NOT_STORED, set(), False),
    ],
)
def test_a_failed_send_says_by_its_type_what_happened(
    code: str, outcome: Outcome, kinds: set[type], retryable: bool
) -> None:
    error = send_error(code, "why", outcome)
    assert isinstance(error, SendError)
    assert isinstance(error, RequestError)
    every = {NodeUnavailableError, TopicNotFoundError, ProducerFencedError, ProtocolError}
    assert {kind for kind in every if isinstance(error, kind)} == kinds
    assert (error.code, error.outcome, error.retryable) == (code, outcome, retryable)
    assert str(error) == f"{code}: why"


def test_a_dead_network_is_no_refusal() -> None:
    error = NodeUnavailableError("away")
    assert not isinstance(error, ProtocolError)
    assert error.code == Code.NODE_UNAVAILABLE
    assert error.retryable


def test_a_refusal_has_the_class_of_its_code() -> None:
    refused = wire.refusal({"code": "TOPIC_NOT_EXIST", "error": "there is no topic t"})
    assert isinstance(refused, TopicNotFoundError)
    assert not refused.retryable
    assert type(wire.refusal({"code": "NO_PERMISSION", "error": "no"})) is ProtocolError


def test_a_batch_of_which_something_is_stored_is_not_to_be_sent_again() -> None:
    cause = send_error("SYSTEM_BUSY", "later", Outcome.NOT_STORED)
    whole = BatchSendError(cause, acks=[], stored=0, unknown=0, total=3, stored_prefix=0)
    part = BatchSendError(cause, acks=[], stored=1, unknown=0, total=3, stored_prefix=1)
    assert whole.retryable
    assert not part.retryable


def test_a_fenced_batch_is_a_fenced_send() -> None:
    for code, kind in (
        ("PRODUCER_FENCED", ProducerFencedError),
        ("TOPIC_NOT_EXIST", TopicNotFoundError),
        ("TIMEOUT", NodeUnavailableError),
    ):
        cause = send_error(code, "why", Outcome.NOT_STORED)
        error = BatchSendError(cause, acks=[], stored=0, unknown=0, total=1, stored_prefix=0)
        assert isinstance(error, kind)
        assert isinstance(error, BatchSendError)
        assert error.code == code


@pytest.mark.parametrize(
    "error",
    [
        NodeUnavailableError("away"),
        FencedError("not yours"),
        TopicNotFoundError("TOPIC_NOT_EXIST", "there is no topic t", retry_after_ms=3),
        send_error("TIMEOUT", "why", Outcome.UNKNOWN),
        BatchSendError(
            send_error("PRODUCER_FENCED", "why", Outcome.NOT_STORED),
            acks=[],
            stored=1,
            unknown=0,
            total=2,
            stored_prefix=1,
        ),
        StoreLockedError("it is held", pid=7, path="/store"),
        CutRefusedError("it would lose messages", path="/store", end=3),
        FilterError("what is this", position=4),
        ConfigError("no such key"),
        MissingExtraError("pip install it"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: CommitMQError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
