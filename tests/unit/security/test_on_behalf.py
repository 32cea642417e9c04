"""Goal: only the holder of the key can name somebody else as the one who asks, and only as it was said.

Method: fields that were made with the key, then each changed in one place, with other types, and with another key.
"""

from __future__ import annotations

from typing import Any

import pytest

from commitmq.security.audit import Actor
from commitmq.security.native_rights import FIELD, Vouching

ANN = Actor("ann", "dashboard", "10.1.2.3")


def header(vouching: Vouching, actor: Actor = ANN, op: str = "topic.create") -> dict[str, Any]:
    return {"op": op, "id": 1, **vouching.fields(op, actor)}


def test_the_holder_of_the_key_is_believed() -> None:
    key = Vouching.draw()
    assert Vouching(key).actor(header(Vouching(key))) == ANN
    assert Vouching(key).actor(header(Vouching(key), Actor("", "dashboard", "::1"))) == Actor("", "dashboard", "::1")
    odd = Actor("\ud800" + "n" * 1_000, "p", "a")
    assert Vouching(key).actor(header(Vouching(key), odd)) == Actor("?" + "n" * 299, "p", "a")
    assert key not in repr(Vouching(key)) + str(header(Vouching(key)))


@pytest.mark.parametrize(
    "change",
    [
        {"user": "root"},
        {"protocol": "native"},
        {"address": "local"},
        {"proof": "0" * 64},
        {"proof": ""},
        {"proof": None},
        {"proof": "é\ud800"},
        {"user": None},
        {"user": ["ann"]},
        {"address": 1},
    ],
)
def test_whatever_was_changed_is_not_believed(change: dict[str, Any]) -> None:
    vouching = Vouching(Vouching.draw())
    made = header(vouching)
    made[FIELD] |= change
    assert vouching.actor(made) is None


def test_texts_do_not_run_together() -> None:
    vouching = Vouching(Vouching.draw())
    made = header(vouching, Actor("ab", "c", "d"))
    made[FIELD] |= {"user": "a", "protocol": "bc"}
    assert vouching.actor(made) is None


def test_a_proof_is_for_one_operation_and_one_start() -> None:
    vouching = Vouching(Vouching.draw())
    assert vouching.actor({**header(vouching), "op": "topic.delete"}) is None
    assert Vouching(Vouching.draw()).actor(header(vouching)) is None
    wrong: tuple[Any, ...] = (None, True, [], "x", {})
    for field in wrong:
        assert vouching.actor({"op": "topic.create", "id": 1, FIELD: field}) is None


def test_without_a_key_nobody_is_believed_or_named() -> None:
    nobody = Vouching("")
    assert nobody.fields("topic.create", ANN) == {}
    assert nobody.actor(header(Vouching(Vouching.draw()))) is None
    forged = {"op": "topic.create", "id": 1, FIELD: {"user": "ann", "protocol": "x", "address": "y", "proof": ""}}
    forged[FIELD]["proof"] = nobody._proof("topic.create", "ann", "x", "y")  # type: ignore[index]
    assert nobody.actor(forged) is None
