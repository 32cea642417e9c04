"""Goal: each request of RocketMQ's tools that changes a node goes to the audit log, with its outcome and without secrets.

Method: handlers that succeed, fail and raise, at once and later, behind the wrapper, with a log in a folder; and the table of
rights, in which a change is what needs Create, Update or Delete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from commitmq.log import get_log
from commitmq.plugin import AuditLog
from commitmq.security.audit_trail import AuditTrail
from commitmq.security.policy import Action
from commitmq_plugins.rocketmq.broker.rights import CHANGES, Auditing, needs_of
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command, RemotingError

FIELDS = {"topic": "orders", "perm": "6", "AccessKey": "ann", "Signature": "canary", "SecurityToken": "canary"}


class Peer:
    peer = ("10.1.2.3", 40_000)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AuditLog]:
    (tmp_path / "commitmq").mkdir()
    found = AuditLog(tmp_path / "commitmq" / "audit", "worker-rocketmq_broker", get_log("test"))
    yield found
    found.close()


def lines(log: AuditLog) -> list[dict[str, Any]]:
    return list(AuditTrail(log.path.parent).lines())


def asked(log: AuditLog, answer: Any, *, later: bool = False) -> None:
    """A change whose handler answers with ``answer``, or raises it."""

    def handle(connection: Any, command: Command) -> Command | Awaitable[Command | None] | None:
        if later:
            return wait()
        if isinstance(answer, Exception):
            raise answer
        return cast("Command | None", answer)

    async def wait() -> Command | None:
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return cast("Command | None", answer)

    command = Command(int(RequestCode.UPDATE_AND_CREATE_TOPIC), 7, ext_fields=dict(FIELDS))
    found = Auditing(log, "DefaultCluster").of_change(handle)(cast("Any", Peer()), command)
    if later:
        assert found is not None
        asyncio.run(cast("Any", found))


@pytest.mark.parametrize("later", [False, True])
def test_a_change_has_a_line_before_it_and_one_when_it_fails(log: AuditLog, later: bool) -> None:
    asked(log, Command(ResponseCode.SUCCESS), later=later)
    asked(log, Command(ResponseCode.SYSTEM_ERROR, remark="no room"), later=later)
    with pytest.raises(OSError, match="gone"):
        asked(log, OSError("gone"), later=later)
    asked(log, None, later=later)
    found = lines(log)
    assert [(one["decision"], one.get("reason")) for one in found] == [
        ("allowed", None),
        ("allowed", None),
        ("failed", "no room"),
        ("allowed", None),
        ("failed", "gone"),
        ("allowed", None),
    ]
    first = found[0]
    assert (first["user"], first["op"], first["resource"], first["address"], first["request"]) == (
        "ann",
        "UPDATE_AND_CREATE_TOPIC",
        "Topic:orders",
        "10.1.2.3",
        7,
    )
    assert first["after"] == {"topic": "orders", "perm": "6"}
    assert b"canary" not in log.path.read_bytes()


CHANGING = {Action.CREATE, Action.UPDATE, Action.DELETE}


def test_every_request_that_needs_the_right_to_change_is_one() -> None:
    fields = {"topic": "t", "group": "g", "groupName": "g", "consumerGroup": "g", "srcGroup": "g", "destGroup": "g"}
    found = set()
    for code in RequestCode:
        try:
            needs = needs_of(Command(int(code), ext_fields=fields, body=dumps({"groupName": "g"})), "c") or []
        except RemotingError:
            continue
        if any(set(actions) <= CHANGING for _, actions in needs):
            found.add(code)
    assert found == CHANGES
