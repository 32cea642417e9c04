"""Goal: users go from node to node without secrets, and an import never changes a credential.

Method: tables of users and documents that are made from them, changed, or wrong.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from commitmq.security.access_file import AccessTable
from commitmq.security.imported_access import ExportedUsers, UserChange, exported_users
from commitmq.security.policy import MAX_KEYS, Policies, Secret, User

KEYS = tuple(digit * 40 for digit in "123456789abcdefghi")
ENTRY = {"resource": "Topic:orders", "actions": ["Pub"], "decision": "Allow"}
POLICIES = Policies.from_json({"custom": [ENTRY]})
ROW: dict[str, Any] = {"name": "shop", "type": "Normal", "status": "enable", "keys": [KEYS[0]],
                       "quotas": {"connections": 3}, "policies": {"custom": [ENTRY]}}  # fmt: skip


def table() -> AccessTable:
    users = {
        "root": User("root", Secret("canary-of-root"), is_super=True),
        "shop": User("shop", Secret("canary-of-shop"), keys=(KEYS[0],), quotas=(("connections", 3),)),
    }
    return AccessTable(users, {"shop": POLICIES})


def test_a_table_comes_back_without_its_secrets() -> None:
    rows = exported_users(table())
    assert b"canary" not in orjson.dumps(rows)
    assert rows[1] == ROW
    wanted = ExportedUsers.of({"users": rows})
    assert wanted.compared(table()).changes == []
    made = AccessTable()
    done = wanted.put_into(made)
    assert [(one.name, one.before) for one in done.changes] == [("root", None), ("shop", None)]
    assert exported_users(made) == rows
    secrets = {one.secret.reveal() for one in made.users.values()}
    assert len(secrets) == 2
    assert not any("canary" in one for one in secrets), "a new user has a secret of its own"


def test_a_user_that_is_there_keeps_its_credentials() -> None:
    other = {**ROW, "type": "Super", "keys": [KEYS[1]], "quotas": {}, "policies": {}}
    wanted, now = ExportedUsers.of({"users": [other]}), table()
    done = wanted.put_into(now)
    before = {"type": "Normal", "quotas": {"connections": 3}, "policies": {"custom": [ENTRY]}}
    assert done.changes == [UserChange("shop", before, {"type": "Super", "quotas": {}, "policies": {}})]
    assert done.keys_kept == ["shop"]
    assert now.users["shop"] == User("shop", Secret("canary-of-shop"), is_super=True, keys=(KEYS[0],))
    assert now.policies["shop"] == Policies()
    assert now.users["root"] == table().users["root"], "what the document does not name stays"


def test_a_key_has_one_user() -> None:
    wanted, now = ExportedUsers.of({"users": [{**ROW, "name": "kiosk"}]}), table()
    assert wanted.compared(now).conflicts == ["user kiosk has a key that user shop has already"]
    with pytest.raises(ValueError, match="user kiosk has a key that user shop has already"):
        wanted.put_into(now)
    assert exported_users(now) == exported_users(table())


@pytest.mark.parametrize(
    ("users", "sentence"),
    [
        (None, "users: the document has none; export it with them"),
        ({}, "users must be a list"),
        ([7], "users[0]: a user must be an object"),
        ([{**ROW, "secret": "canary-of-shop"}], "users[0]: a user has no member 'secret'; there are name, type"),
        ([ROW, ROW], "users[1]: shop is there twice; leave one out"),
        ([{"name": "shop"}], "users[0]: 'type' is missing"),
        ([{**ROW, "name": "a b"}], "users[0]: a user's name has"),
        ([{**ROW, "type": "Root"}], "users[0]: a user's type is Super or Normal"),
        ([{**ROW, "keys": ["canary"]}], "users[0]: a public key has 40 characters"),
        ([{**ROW, "keys": 7}], "users[0] has not the shape of a user"),
        ([{**ROW, "keys": list(KEYS[: MAX_KEYS + 1])}], f"users[0]: shop must have at most {MAX_KEYS} keys"),
        ([{**ROW, "quotas": {"x": 1}}], "users[0]: there is no quota 'x'"),
        ([{**ROW, "policies": []}], "users[0] has not the shape of a user"),
        ([{**ROW, "policies": {"custom": [{**ENTRY, "actions": ["Fly"]}]}}], "users[0]: an action is one of"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(users: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # its sentence is compared
        ExportedUsers.of({"users": users})
    assert sentence in str(caught.value)
    assert "canary" not in str(caught.value)
