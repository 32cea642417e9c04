"""Goal: one function decides what a user may do, by RocketMQ's rules; Deny wins among equals.

Method: each rule with a case of its own, and a second, naive decision over generated policies. That RocketMQ's own classes
decide the same is shown in tests/interop/test_users.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.security.access_file import AccessTable
from commitmq.security.policy import (
    Action,
    Policies,
    PolicyEntry,
    Resource,
    ResourceType,
    Secret,
    User,
    decide,
    parse_address,
)

ORDERS = Resource(ResourceType.TOPIC, "orders")
ANN = User("ann", Secret("a-secret-of-ann"))
PUB = (Action.PUB,)


def entry(resource: str, actions: str = "All", decision: str = "Allow", *networks: str) -> PolicyEntry:
    members: dict[str, Any] = {"resource": resource, "actions": actions.split(","), "decision": decision}
    return PolicyEntry.from_json({**members, "from": list(networks)})


def may(
    *entries: PolicyEntry, default: tuple[PolicyEntry, ...] = (), address: str = "10.1.2.3", user: User = ANN
) -> bool:
    return decide(user, Policies(entries, default), ORDERS, PUB, parse_address(address)).allowed


def test_nothing_matches_means_no() -> None:
    assert not may()
    assert not may(entry("Topic:other"), entry("Group:orders"), entry("Topic:orders", "Sub,Get"))


def test_super_users_may_everything_unless_they_are_disabled() -> None:
    assert may(user=User("root", ANN.secret, is_super=True))
    assert not may(user=User("root", ANN.secret, is_super=True, is_enabled=False))
    assert not may(entry("*"), user=User("ann", ANN.secret, is_enabled=False))


@pytest.mark.parametrize(
    ("entries", "allowed"),
    [
        ([("Topic:orders", "Allow"), ("Topic:order*", "Deny")], True),
        ([("Topic:orders", "Deny"), ("Topic:order*", "Allow")], False),
        ([("Topic:orde*", "Deny"), ("Topic:order*", "Allow")], True),
        ([("Topic:*", "Deny"), ("Topic:o*", "Allow")], True),
        ([("*", "Deny"), ("Topic:*", "Allow")], True),
        ([("*", "Allow"), ("Topic:*", "Deny")], False),
    ],
)
def test_the_most_exact_entry_decides(entries: list[tuple[str, str]], allowed: bool) -> None:
    found = [entry(resource, "Pub", decision) for resource, decision in entries]
    assert may(*found) == may(*reversed(found)) == allowed


def test_deny_wins_among_equals() -> None:
    both = entry("Topic:orders", "Pub", "Allow"), entry("Topic:orders", "All", "Deny")
    assert not may(*both)
    assert not may(*reversed(both))


def test_default_entries_count_only_where_no_custom_one_matches() -> None:
    assert may(default=(entry("*"),))
    assert not may(entry("*", "Pub", "Deny"), default=(entry("Topic:orders"),))
    assert may(entry("*", "Sub", "Deny"), default=(entry("Topic:orders"),))


@pytest.mark.parametrize(
    ("network", "address", "allowed"),
    [
        ("10.1.0.0/16", "10.1.2.3", True),
        ("10.1.9.9/16", "10.1.2.3", True),
        ("10.1.0.0/16", "10.2.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.4", False),
        ("10.1.0.0/16", "::ffff:10.1.2.3", True),
        ("fd00::/8", "fd00::1", True),
        ("fd00::/8", "10.1.2.3", False),
        ("10.1.0.0/16", "not an address", False),
    ],
)
def test_addresses(network: str, address: str, allowed: bool) -> None:
    assert may(entry("*", "All", "Allow", network), address=address) == allowed


def test_a_request_of_several_actions_needs_one() -> None:
    policies = Policies((entry("Topic:orders", "Get"),))
    assert decide(ANN, policies, ORDERS, (Action.SUB, Action.GET), None).allowed
    assert decide(ANN, policies, ORDERS, (Action.ANY,), None).allowed
    assert not decide(ANN, policies, ORDERS, (Action.SUB,), None).allowed


@pytest.mark.parametrize(
    "members",
    [
        {"resource": "*", "actions": [], "decision": "Allow"},
        {"resource": "*", "actions": ["Any"], "decision": "Allow"},
        {"resource": "*", "actions": ["Write"], "decision": "Allow"},
        {"resource": "*", "actions": ["Pub"], "decision": "Maybe"},
        {"resource": "*", "actions": ["Pub"], "decision": "Allow", "from": ["10.0.0.0/99"]},
        {"resource": "x", "actions": ["Pub"], "decision": "Allow"},
    ],
)
def test_what_is_no_entry_is_refused(members: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"actions?|decision|address|resource"):
        PolicyEntry.from_json(members)


RESOURCES = st.sampled_from(
    ["*", "Topic:*", "Topic:o*", "Topic:ord*", "Topic:orders", "Group:*", "Group:orders", "Topic:x"]
)
ENTRIES = st.lists(
    st.builds(
        entry,
        RESOURCES,
        st.sampled_from(["Pub", "Sub", "Pub,Sub", "All", "Get"]),
        st.sampled_from(["Allow", "Deny"]),
    ),
    max_size=6,
)


@given(ENTRIES, ENTRIES)
def test_a_second_decision_agrees(custom: list[PolicyEntry], default: list[PolicyEntry]) -> None:
    exactness = ["Topic:orders", "Topic:ord*", "Topic:o*", "Topic:*", "*"]

    def naive() -> bool:
        for entries in (custom, default):
            matching = [
                one for one in entries if one.actions & {Action.PUB, Action.ALL} and str(one.pattern) in exactness
            ]
            for text in exactness:
                equals = [one.allow for one in matching if str(one.pattern) == text]
                if equals:
                    return all(equals)
        return False

    decision = decide(ANN, Policies(tuple(custom), tuple(default)), ORDERS, PUB, None)
    assert decision.allowed == naive(), decision.reason


def test_an_entry_is_written_as_it_is_read() -> None:
    one = Policies((entry("Topic:o*", "Sub,Pub", "Deny", "10.0.0.0/8"),), (entry("*"),))
    assert Policies.from_json(one.to_json()) == one


def test_a_table_remembers_decisions_and_nobody_unknown() -> None:
    table = AccessTable({"ann": ANN}, {"ann": Policies((entry("Topic:orders", "Pub"),))})
    assert table.decide("ann", ORDERS, PUB, "10.1.2.3") is table.decide("ann", ORDERS, PUB, "10.1.2.3")
    refused = table.decide("bob", ORDERS, PUB, "10.1.2.3")
    assert not refused.allowed
    assert "no user 'bob'" in refused.reason
    assert table.decide("ann", ORDERS, PUB, "10.1.2.3").allowed
    changed = table.copy()
    changed.policies["ann"] = Policies((entry("*", "All", "Deny"),))
    assert not changed.decide("ann", ORDERS, PUB, "10.1.2.3").allowed
