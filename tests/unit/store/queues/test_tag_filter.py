"""Goal: the hashes of a tag filter are Java's, and a client cannot make them expensive.

Method: hypothesis draws texts of every kind; the plain loop over UTF-16 units is the reference.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commitmq.format.java import java_string_hash
from commitmq.store.queues.tag_filter import string_hashes


@given(st.lists(st.text(st.characters(codec=None), min_size=1, max_size=40), min_size=1, max_size=40))
def test_all_hashes_are_those_of_the_plain_loop(texts: list[str]) -> None:
    assert string_hashes(texts).tolist() == [java_string_hash(text) for text in texts]


def test_long_texts_wrap_as_in_java() -> None:
    texts = ["x" * 65_000, "y", "\uffff" * 1_000, *(f"tag-{number}" for number in range(20))]
    assert string_hashes(texts).tolist() == [java_string_hash(text) for text in texts]
