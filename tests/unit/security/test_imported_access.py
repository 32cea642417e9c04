"""Goal: RocketMQ's users and policies come over with the rights they had, never with more, and no error shows a secret.

Method: tables and JSON of ACL 2.0, and many that are wrong.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from commitmq.security.access_file import AccessTable
from commitmq.security.imported_access import read_json, read_tables
from commitmq.security.policy import Secret, User

USERS = """\
#UserName         #Password               #UserType               #UserStatus
shop              canary-of-shop          Normal                  enable
root              canary-of-root          Super                   disable
get user from 127.0.0.1:10911 success.
"""
ENTRIES = """\
#Subject          #PolicyType  #Resource               #Actions              #SourceIp                 #Decision
User:shop         Custom      Topic:orders-*          [Pub, Sub]            [10.1.0.0/16, 10.2.0.1]   Allow
User:shop         Custom      Group:billing           [Sub]                 null                      Deny
User:shop         Default     *                       [Get]                 []                        Allow
#Subject          #PolicyType  #Resource               #Actions              #SourceIp                 #Decision
User:shop         Custom      Group:billing           [Sub]                 null                      Deny
User:root
"""


def document() -> list[dict[str, Any]]:
    """The answers of a broker that say what USERS and ENTRIES say."""
    entries = [
        ("Topic:orders-*", ["Pub", "Sub"], ["10.1.0.0/16", "10.2.0.1"], "Allow"),
        ("Group:billing", ["Sub"], None, "Deny"),
    ]
    rows = [dict(zip(("resource", "actions", "sourceIps", "decision"), one, strict=True)) for one in entries]
    usual = {"resource": "*", "actions": ["Get"], "decision": "Allow"}
    return [
        {"username": "shop", "password": "canary-of-shop", "userType": "Normal", "userStatus": "enable"},
        {"username": "root", "password": "canary-of-root", "userType": "Super", "userStatus": "disable"},
        {"subject": "User:shop", "policies": [{"policyType": "Custom", "entries": rows},
                                              {"policyType": "Default", "entries": [usual]}]},
        {"subject": "User:root"},
    ]  # fmt: skip


def test_tables_and_json_of_acl_2_say_the_same() -> None:
    found = read_tables(USERS + ENTRIES)
    assert found == read_json(orjson.dumps(document()).decode())
    assert found.users["shop"] == User("shop", Secret("canary-of-shop"))
    assert found.users["root"] == User("root", Secret("canary-of-root"), is_super=True, is_enabled=False)
    assert found.policies["shop"].to_json() == {
        "custom": [
            {"resource": "Topic:orders-*", "actions": ["Pub", "Sub"], "decision": "Allow",
             "from": ["10.1.0.0/16", "10.2.0.1/32"]},
            {"resource": "Group:billing", "actions": ["Sub"], "decision": "Deny"},
        ],
        "default": [{"resource": "*", "actions": ["Get"], "decision": "Allow"}],
    }  # fmt: skip
    assert read_tables("07:15:41 |-INFO in the log of mqadmin\n#a\n" + USERS + ENTRIES) == found
    parts = read_tables(ENTRIES)
    parts.merge(read_tables(USERS))
    assert (parts.users, parts.policies) == (found.users, found.policies)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("#UserName #Password\nshop canary-x Normal", "line 2: a user has name, password, type and status"),
        ("#UserName #Password\nshop canary word-canary enable", "line 2: user shop: a secret has"),
        ("#UserName #Password\nshop my-secret canary enable", "line 2: user shop: super or normal must be there"),
        (
            "#UserName #Password\nshop ******** Normal enable",
            "line 2: user shop has no password, or one that is hidden",
        ),
        ("#UserName #Password\nshop null Normal enable", "line 2: user shop has no password"),
        (USERS + "shop another-canary Normal enable", "line 5: user shop is there twice, and not the same"),
        (USERS + "# canary", "line 5: a user has name, password"),
        ("#Subject #PolicyType\nUser:shop Custom Topic:a Pub null Allow", "line 2: an entry has subject, type"),
        ("#Subject #PolicyType\nGroup:a Custom Topic:a [Pub] null Allow", "line 2: a subject is User:NAME"),
        ("#Subject #PolicyType\nUser:a Custom Topic:a [Fly] null Allow", "line 2: an action is one of"),
        ("#Subject #PolicyType\nUser:a Custom Topic:a [Pub] [x] Allow", "line 2: an address is an IP"),
        ("#Subject #PolicyType\nUser:a Custom null [Pub] null Allow", "line 2: a resource is *"),
        ("#Subject #PolicyType\nUser:a Custom Topic:a [] null Allow", "line 2: an entry needs at least one action"),
        ("#Subject #PolicyType\nUser:a Other Topic:a [Pub] null Allow", "line 2: custom or default must be there"),
    ],
)
def test_what_is_wrong_in_a_table_is_named_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # its sentence is compared
        read_tables(text)
    assert sentence in str(caught.value)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([7], "[0]: it must be an object"),
        ([{"username": "shop"}], "[0]: user shop has no password"),
        ([{"username": "shop", "password": 7}], "[0]: user shop has no password"),
        ([{"username": "shop", "password": "canary-x", "userType": 7}], "[0] has not the shape"),
        ([{"username": "shop", "password": "canary-x", "secret": ""}], "[0]: there is no member 'secret'"),
        ([{}], "[0]: 'subject' is missing"),
        ([{"subject": "User:a", "policies": [7]}], "[0] has not the shape"),
        ([{"subject": "User:a", "policies": [{"entries": [{"resource": "*"}]}]}], "[0]: 'actions' is missing"),
    ],
)
def test_what_is_wrong_in_json_is_named_with_its_place(rows: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # its sentence is compared
        read_json(orjson.dumps(rows).decode())
    assert sentence in str(caught.value)
    assert "canary" not in str(caught.value)
    with pytest.raises(ValueError, match=r"line 1, column \d+: no JSON"):
        read_json('[{"password": "canary"')


def test_all_is_taken_or_nothing_and_the_same_again_changes_nothing() -> None:
    found, table = read_tables(USERS + ENTRIES), AccessTable()
    assert [one.name for one in found.put_into(table)] == ["root", "shop"]
    assert found.put_into(table) == []
    table.users["shop"] = User("shop", Secret("canary-of-shop"), keys=("k" * 40,), quotas=(("connections", 3),))
    assert found.compared(table) == ([], []), "keys and quotas are not RocketMQ's"
    assert read_tables(USERS).compared(table) == ([], []), "of entries it says nothing"

    other = read_tables(USERS.replace("canary-of-root", "another-of-root") + "new canary-of-new Normal enable")
    before = table.copy()
    with pytest.raises(ValueError, match="user root is there already, with another secret;"):
        other.put_into(table)
    assert (table.users, table.policies) == (before.users, before.policies)
    changed = read_tables(
        USERS.replace("Super", "Normal").replace("disable", "enable") + ENTRIES.replace("Get", "List")
    )
    assert changed.compared(table)[1] == [
        "user root is there already, with another type and status; delete it, or leave it out",
        "user shop is there already, with another set of entries; delete it, or leave it out",
    ]


def test_entries_need_their_user() -> None:
    entries, table = read_tables(ENTRIES), AccessTable()
    assert entries.compared(table)[1][0] == "there is no user root to have the entries; import the users too"
    read_tables(USERS).put_into(table)
    (change,) = entries.put_into(table)
    assert (change.name, change.user) == ("shop", None)
    assert table.policies["shop"] == entries.policies["shop"]
    assert entries.put_into(table) == []
