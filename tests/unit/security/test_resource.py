"""Goal: patterns of resources are read, written and matched as RocketMQ does it, and what is none is refused.

Method: RocketMQ's forms and their neighbours one by one; round trips over generated names.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.security.policy import Resource, ResourcePattern, ResourceType

NAMES = st.text("abc-_%.XYZ123", min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("text", "hits", "misses"),
    [
        ("*", ["Topic:a", "Group:b", "Cluster:c"], []),
        ("Any:*", ["Topic:a", "Cluster:c"], []),
        ("Topic:*", ["Topic:a", "Topic:*"], ["Group:a"]),
        ("topic:order*", ["Topic:order", "Topic:orders"], ["Topic:orde", "Topic:Orders", "Group:orders"]),
        ("Topic:orders", ["Topic:orders"], ["Topic:orders2", "Topic:order"]),
        ("Group:a:b", ["Group:a:b"], ["Group:a"]),
    ],
)
def test_patterns_match(text: str, hits: list[str], misses: list[str]) -> None:
    pattern = ResourcePattern.parse(text)
    for one in (*hits, *misses):
        kind, _, name = one.partition(":")
        assert pattern.matches(Resource(ResourceType(kind), name)) == (one in hits), one


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Topic",
        "Topic:",
        "Queue:a",
        "Topic:a*b",
        "Topic:**",
        "Any:a",
        "Any:a*",
        ":a",
        "Topic:a\n",
        f"Topic:{'x' * 256}",
    ],
)
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="resource"):
        ResourcePattern.parse(text)


@given(st.sampled_from([one for one in ResourceType if one is not ResourceType.ANY]), NAMES, st.booleans())
def test_a_pattern_is_written_as_it_is_read(kind: ResourceType, name: str, prefix: bool) -> None:
    pattern = ResourcePattern(kind, name, prefix)
    assert ResourcePattern.parse(str(pattern)) == pattern


def test_the_most_exact_pattern_comes_first() -> None:
    texts = ["Topic:orders", "Topic:orders*", "Topic:ord*", "Topic:*", "*"]
    patterns = [ResourcePattern.parse(one) for one in reversed(texts)]
    assert [str(one) for one in sorted(patterns, key=lambda one: one.rank)] == texts
