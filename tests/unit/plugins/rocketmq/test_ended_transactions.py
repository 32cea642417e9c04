"""Goal: END_TRANSACTION does what RocketMQ's does with each decision; an end that says nothing leaves the transaction open.

Method: the real handler over a node that the test plays.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.config import NodeConfig
from commitmq.errors import ProtocolError
from commitmq.log import get_log
from commitmq_plugins.rocketmq.broker.transactions import EndTransactionProcessor
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request


def ended(decision: int, refusal: ProtocolError | None = None, **more: str) -> tuple[Command, list[dict[str, Any]]]:
    """The answer to an end, and what the transaction process was asked for."""
    asked: list[dict[str, Any]] = []

    async def mover(role: str, op: str, *, timeout_s: float, **fields: Any) -> None:
        assert (role, op) == ("transaction", "transaction.end")
        asked.append(fields)
        if refusal is not None:
            raise refusal

    async def main() -> Command:
        node: Any = SimpleNamespace(config=NodeConfig(), mover=mover)
        clients: Any = SimpleNamespace(producers_changed=[], registry=SimpleNamespace(producers={}))
        counting: Any = SimpleNamespace(stored=lambda *_: None)
        loop: Any = SimpleNamespace(create_task=lambda coroutine: coroutine.close())
        access: Any = SimpleNamespace(asks=lambda _: False)
        transactions = EndTransactionProcessor(node, clients, loop, get_log("test"), counting, access)
        fields = {"producerGroup": "pg", "tranStateTableOffset": "7", "commitLogOffset": "4096", "msgId": "AB",
                  "commitOrRollback": str(decision), **more}  # fmt: skip
        return await transactions.end(None, request(RequestCode.END_TRANSACTION, fields))  # type: ignore[arg-type]

    return asyncio.run(main()), asked


@pytest.mark.parametrize(("decision", "name"), [(8, "commit"), (12, "rollback")])
@pytest.mark.parametrize("is_check", [False, True])
def test_8_commits_and_12_rolls_back(decision: int, name: str, is_check: bool) -> None:
    answer, asked = ended(decision, fromTransactionCheck=str(is_check).lower())
    wanted = {"group": "pg", "queue_offset": 7, "physical_offset": 4_096, "decision": name}
    assert asked == [{**wanted, "from_check": True} if is_check else wanted]
    assert answer.code == 0


@pytest.mark.parametrize("decision", [0, 1, 4, 9, -1])
def test_any_other_decision_leaves_the_transaction_open(decision: int) -> None:
    answer, asked = ended(decision)
    assert (answer.code, asked) == (0, [])


@pytest.mark.parametrize(
    ("code", "number"), [("ILLEGAL_OPERATION", 604), ("SYSTEM_ERROR", 1), ("TRANSACTION_ENDED", 1)]
)
def test_a_refused_end_has_rocketmqs_code(code: str, number: int) -> None:
    answer, _ = ended(8, ProtocolError(code, "because"))
    assert (answer.code, answer.remark is not None and "because" in answer.remark) == (number, True)
