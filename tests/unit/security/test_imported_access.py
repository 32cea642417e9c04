"""Goal: RocketMQ's users and policies come over with the rights they had, never with more, and no error shows a secret.

Method: RocketMQ's own example of ACL 1.0, tables and JSON of ACL 2.0, and many that are wrong; the reader of YAML is compared
with PyYAML.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import yaml

from commitmq.security.access_table import AccessTable
from commitmq.security.imported_access import ImportedAccess
from commitmq.security.mqadmin_acl import read_json, read_tables
from commitmq.security.plain_acl import read_plain_acl
from commitmq.security.plain_yaml import Node, read_yaml
from commitmq.security.policy import Action
from commitmq.security.resource import Resource, ResourceType
from commitmq.security.user import Secret, User

SAMPLE = """
# Licensed to the Apache Software Foundation
globalWhiteRemoteAddresses:
  - 10.10.103.*
  - 192.168.0.*

accounts:
  - accessKey: RocketMQ
    secretKey: 01234567
    whiteRemoteAddress:
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      - topicA=DENY
      - topicB=PUB|SUB
      - topicC=SUB
    groupPerms:
      # the group should convert to retry topic
      - groupA=DENY
      - groupB=PUB|SUB
      - groupC=SUB

  - accessKey: rocketmq2
    secretKey: "canary-2"   # a comment
    whiteRemoteAddress: 192.168.1.*
    # if it is admin, it could access all resources
    admin: true
"""
"""conf/plain_acl.yml of RocketMQ 4.9, with other secrets."""

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


def may(found: ImportedAccess, name: str, action: Action, resource: str) -> bool:
    table = AccessTable()
    found.put_into(table)
    kind, _, rest = resource.partition(":")
    return table.decide(name, Resource(ResourceType(kind), rest), {action}, "10.9.9.9").allowed


def plain(node: Node) -> Any:
    """The document as PyYAML's BaseLoader gives it."""
    if isinstance(node.value, dict):
        return {key: plain(one) for key, one in node.value.items()}
    if isinstance(node.value, list):
        return [plain(one) for one in node.value]
    return "" if node.value is None else node.value


@pytest.mark.parametrize(
    "text",
    [
        SAMPLE,
        "---\naccounts:\n- accessKey: a\n  secretKey: 'it''s # no comment'\n  topicPerms: [a=PUB, 'b=SUB' , c=DENY]\n",
        'a: "x\\"y\\\\z"   # c\nb: []\nc:\n  - \n  - d: 1\n    e:\n    - 2\n  -   f: 07\nd-e: http://x:1#y\nf: -1\n',
        "accounts:\n  -\n    accessKey: a\n    secretKey: b#c\n  # c\n\n  - # d\n    accessKey: e\n",
        "﻿a: 10.0.0.*\nb: 2001:db8::/32\n",
    ],
)
def test_yaml_is_read_as_pyyaml_reads_it(text: str) -> None:
    assert plain(read_yaml(text)) == yaml.load(text.removeprefix("﻿"), yaml.BaseLoader)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\n\tb: canary", "line 2: it is no YAML"),
        ("a: 1\n---\nb: canary", "line 2: only one document"),
        ("a: &x canary\nb: *x", "line 2: an alias"),
        ("a: *canary", "line 1: an alias"),
        ("a: !canary b", "line 1: a tag"),
        ("a: 1\nb: !!python/object:canary.x {}", "line 2: a tag"),
        ("a: b\nsecretKey canary", "line 2: it is no YAML"),
        ("a: canary: b", "line 1: it is no YAML"),
        ("a: 'canary", "line 1: it is no YAML"),
        ("a: [canary, b", "line 1: it is no YAML"),
        ("a: 1\na: canary", "line 2: the key 'a' is there twice"),
        ("  a: 1\nb: canary", "line 2: it is no YAML"),
        ("? [canary]\n: b", "line 1: a key must be a text"),
        ("a: \x00canary", "it is no YAML"),
        ("[" * 5_000, "it is no YAML"),
        ("\n".join(f"{'  ' * n}a:" for n in range(30)), "more than 8 levels"),
    ],
)
def test_yaml_that_is_not_known_is_refused_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # its sentence is compared
        read_yaml(text)
    assert sentence in str(caught.value)
    assert "canary" not in str(caught.value)


def test_the_example_of_acl_1_has_the_rights_it_had() -> None:
    found = read_plain_acl(SAMPLE)
    assert found.users == {
        "RocketMQ": User("RocketMQ", Secret("01234567")),
        "rocketmq2": User("rocketmq2", Secret("canary-2"), is_super=True),
    }
    pub, sub = Action.PUB, Action.SUB
    allowed = {
        (action, resource)
        for action in (pub, sub)
        for resource in (f"{kind}:{kind.lower()}{end}" for kind in ("Topic", "Group") for end in "ABCD")
        if may(found, "RocketMQ", action, resource)
    }
    assert allowed == {
        (pub, "Topic:topicB"), (sub, "Topic:topicB"), (sub, "Topic:topicC"),
        (pub, "Group:groupB"), (sub, "Group:groupB"), (sub, "Group:groupC"), (sub, "Group:groupD"),
    }  # fmt: skip
    assert may(found, "rocketmq2", Action.DELETE, "Topic:topicA")
    assert [one.partition(" ")[0] for one in found.skipped] == ["globalWhiteRemoteAddresses", "whiteRemoteAddress"]
    assert not found.refused


def account(*lines: str) -> str:
    return "accounts:\n- accessKey: shop\n  secretKey: canary-of-shop\n" + "".join(f"  {one}\n" for one in lines)


def test_what_acl_2_would_let_do_more_is_refused() -> None:
    narrower = read_plain_acl(account("defaultTopicPerm: PUB|SUB", "topicPerms: [orders=PUB, news=SUB|PUB, x=DENY]"))
    assert len(narrower.refused) == 1
    assert "line 5: account shop may do less with Topic:orders than by its default" in narrower.refused[0]
    assert "would let it Sub too" in narrower.refused[0]
    bounded = read_plain_acl(account("admin: true", "groupPerms:", "- a=SUB"))
    assert "account shop is an admin with topicPerms or groupPerms" in bounded.refused[0]
    table = AccessTable()
    with pytest.raises(ValueError, match="account shop is an admin"):
        bounded.put_into(table)
    assert table == AccessTable()
    assert not read_plain_acl(account("admin: true", "defaultTopicPerm: DENY")).refused


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "line 1: the file must have keys"),
        ("accounts: canary-x", "line 1: accounts must be a list"),
        ("other: 1", "line 1: the file has no key 'other'"),
        ("globalWhiteRemoteAddresses: []", "the file has no accounts"),
        ("accounts: [canary-x]", "line 1: an account must have keys"),
        ("accounts:\n- accessKey: shop", "line 2: an account without secretKey"),
        ("accounts:\n- secretKey: canary-x", "line 2: an account without accessKey"),
        ("accounts:\n- accessKey: a b\n  secretKey: canary-x", "line 2: the account 'a b': a user's name has"),
        ("accounts:\n- accessKey: shop\n  secretKey: canary", "line 2: the account 'shop': a secret has 8 to 256"),
        (account("password: canary-x"), "line 4: an account has no key 'password'"),
        (account("admin: maybe"), "line 2: the account 'shop': admin is true or false"),
        (
            account("defaultTopicPerm: ANY"),
            "line 4: a permission is one of PUB, SUB, PUB|SUB, SUB|PUB, DENY, not 'ANY'",
        ),
        (account("topicPerms: [a=pub]"), "line 4: a permission is one of"),
        (account("topicPerms:", "- orders"), "line 5: a permission is NAME=PUB|SUB, with the name of one topic"),
        (account("groupPerms:", "- '*=SUB'"), "line 5: a permission is NAME=PUB|SUB, with the name of one group"),
        (account("topicPerms: [a=PUB, a=SUB]"), "line 4: account shop has Topic:a twice"),
        (account("topicPerms: a=PUB"), "line 4: topicPerms must be a list"),
        (account() + account().partition("\n")[2], "line 4: the account shop is there twice"),
    ],
)
def test_what_is_wrong_in_acl_1_is_named_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # its sentence is compared
        read_plain_acl(text)
    assert sentence in str(caught.value)
    assert "canary" not in str(caught.value)


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
