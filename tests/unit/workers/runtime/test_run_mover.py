"""Goal: a mover knows of each answer of the writer whether its run is stored, whether to try again, or whether nobody knows.

Method: answers made by hand.
"""

from __future__ import annotations

from typing import Any

import pytest

from commitmq.workers.runtime.run_mover import PutMessageResult, _judged

PLACE = {"queue_offset": 5, "parts": [[2, 4_096]]}


@pytest.mark.parametrize(
    "answer",
    [
        {"ok": True},
        {"ok": False, "code": "FLUSH_DISK_TIMEOUT", "outcome": "stored"},
        {"ok": False, "code": "FLUSH_DISK_TIMEOUT", "outcome": "unknown"},
    ],
    ids=["stored", "flushed late", "perhaps not flushed"],
)
def test_a_stored_run_is_stored_also_when_its_flush_took_too_long(answer: dict[str, Any]) -> None:
    """As in RocketMQ, a commit whose flush times out has succeeded; its position waits for the flush."""
    assert _judged({**answer, **PLACE}) == PutMessageResult(queue_offset=5, parts=[[2, 4_096]])


@pytest.mark.parametrize(
    ("answer", "retry", "is_open"),
    [
        ({"code": "MESSAGE_ILLEGAL", "outcome": "not_stored"}, False, False),
        ({"code": "TOPIC_NOT_EXIST", "outcome": "not_stored"}, False, False),
        ({"code": "TOPIC_NOT_EXIST", "outcome": "not_stored", "retry_after_ms": 100}, True, False),
        ({"code": "SYSTEM_BUSY", "outcome": "not_stored"}, True, False),
        ({"code": "SERVICE_NOT_AVAILABLE", "outcome": "unknown"}, True, True),
    ],
)
def test_a_refused_run_is_tried_again_where_waiting_may_help(
    answer: dict[str, Any], retry: bool, is_open: bool
) -> None:
    put = _judged({"ok": False, "error": "why", **answer})
    assert (put.code, put.sentence, put.retry, put.is_open) == (answer["code"], "why", retry, is_open)
