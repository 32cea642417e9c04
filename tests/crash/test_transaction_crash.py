"""Goal: whatever dies while transactions end and are checked, each committed message is there once, and no other one ever.

Method: a producer commits, rolls back and leaves open transactions in several queues; the transaction process, the writer
and the whole node die at named places (failpoints); a listener answers the checks. Then the topic is read as a whole. The
last case forgets the positions, so that all is found in the queues and in the log.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from commitmq import Admin, HalfMessage, Producer, SendError, TransactionState
from delays import everything
from mover_crashes import QUEUES, TOPIC, dying_node, fired_folder, make_topic, places
from nodes import Node, eventually, started
from transactions import QUICK

pytestmark = pytest.mark.timeout(240)
EACH = 24
FIRST = ("transaction.after_commit=kill@3", "transaction.after_renewal=kill@1", "writer.after_append=kill_node@24")
PLACES = (
    "transaction.begin=kill@1",
    "transaction.before_commit=kill@4",
    "transaction.before_answer=kill@5",
    "transaction.before_op=kill@2",
    "transaction.after_op=kill@2",
    "transaction.before_renewal=kill@1",
    "transaction.after_positions=kill@1",
    "writer.before_append=kill@20",
    "writer.after_append=kill@21",
    "writer.after_publish=kill@22",
    "flush.before_fdatasync=kill@9",
    "dispatcher.consume_queue.before_dispatch=kill@12",
)
LONG = (
    "transaction.after_commit=kill_node@5",
    "transaction.before_op=kill_node@2",
    "transaction.after_op=kill_node@3",
    "transaction.after_renewal=kill_node@1",
    "transaction.after_positions=kill_node@1",
    "transaction.after_commit=stop@3",
)


def decide(key: str) -> TransactionState:
    """Messages of each kind end in a way of their own."""
    return TransactionState.ROLLBACK if key.startswith("no") else TransactionState.COMMIT


def work(producer: Producer) -> list[bytes]:
    """Transactions of all kinds; returns the bodies that must be there in the end."""
    wanted = []
    for number in range(EACH):
        for kind in ("yes", "no", "yes-open", "no-open"):
            body = f"{kind}-{number}".encode()
            try:
                with producer.transaction(TOPIC, body, keys=kind, queue=number % QUEUES, timeout_s=20) as transaction:
                    if kind.endswith("open"):
                        transaction.unknown()
                    elif kind == "no":
                        transaction.rollback()
            except SendError:
                if transaction.state is None:
                    continue  # its half message was not acknowledged: the listener decides, if it is there at all
            if kind.startswith("yes"):
                wanted.append(body)
    return wanted


def check(node: Node, wanted: list[bytes]) -> None:
    def found() -> Counter[bytes]:
        return Counter(one.body for one in everything(node, TOPIC))

    eventually(lambda: set(wanted) <= set(found()), "every committed message is there", timeout_s=90)
    with Admin(node.address) as admin:
        eventually(lambda: not admin.transactions(), "no transaction is open", timeout_s=60)
    now = found()
    assert not {body: times for body, times in now.items() if times > 1}, "a message is there twice"
    assert not [body for body in now if body.startswith(b"no")], "a rolled-back message is there"


def run(node: Node) -> list[bytes]:
    def asked(message: HalfMessage) -> TransactionState:
        return decide(message.keys[0])

    with Producer(node.address, group="crash", transaction_listener=asked, timeout_s=20) as producer:
        wanted = work(producer)
        eventually(node.is_ready, "the node is whole again", timeout_s=60)
        check(node, wanted)
    return wanted


@pytest.mark.parametrize("place", places(FIRST[:2], PLACES[:1], (*FIRST[2:], *PLACES[1:], *LONG)))
def test_each_transaction_ends_once(tmp_path: Path, place: str) -> None:
    with dying_node(tmp_path, QUICK, place) as node:
        run(node)
        assert any(fired_folder(tmp_path).iterdir()), f"{place} did not fire"


@pytest.mark.slow
def test_positions_that_are_lost_change_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path / "store", *QUICK)
    with started(node):
        make_topic(node)
        wanted = run(node)
        assert node.stop().returncode == 0
        for name in ("config/consumerOffset.json", "commitmq/offsets.journal"):
            for path in (node.store / name, node.store / f"{name}.bak"):
                path.unlink(missing_ok=True)
        assert node.start().returncode == 0
        check(node, wanted)
        check(node, wanted)
