"""Goal: any body is shown, as what it is, within bounds. Method: bodies of every kind, in messages as a client has them."""

from __future__ import annotations

import time

import pytest

from commitmq import Message
from commitmq_plugins.dashboard.api.messages import BODY_BYTES, PREVIEW_BYTES, SearchFilter, place_of, row_of, whole
from commitmq_plugins.dashboard.api.node import BadValueError


@pytest.mark.parametrize(
    ("body", "form", "shown"),
    [
        (b"plain", "text", "plain"),
        (b'{"a":[1,2]}', "json", '{\n  "a": [\n    1,\n    2\n  ]\n}'),
        ('["küche"]'.encode(), "json", '[\n  "küche"\n]'),
        (b"{not json", "text", "{not json"),
        (b"[" * 20_000, "text", "[" * 20_000),
        (b"[" + b"1" * 6_000 + b"]", "text", "[" + "1" * 6_000 + "]"),
        (b"\xff\x00\x01", "hex", "ff 00 01"),
    ],
)
def test_bodies(body: bytes, form: str, shown: str) -> None:
    found = whole(Message(body))
    assert (found.body_form, found.body, found.body_bytes, found.body_is_cut) == (form, shown, len(body), False)


def test_a_deep_body_does_not_become_a_huge_page() -> None:
    deep = b"[" * 400 + b",".join([b"[1]"] * 9_000) + b"]" * 400
    began = time.monotonic()
    found = whole(Message(deep))
    assert (found.body_form, len(found.body)) == ("text", len(deep))
    assert time.monotonic() - began < 2


def test_long_bodies_are_cut_between_characters() -> None:
    text = "ü" * BODY_BYTES
    found = whole(Message(text.encode()))
    assert found.body_is_cut
    assert found.body_form == "text"
    assert set(found.body) == {"ü"}
    assert len(found.body) <= BODY_BYTES
    row = row_of(Message(b"x" + text.encode()))
    assert row.is_text
    assert set(row.preview) == {"x", "ü"}
    assert len(row.preview) <= PREVIEW_BYTES
    assert not row_of(Message(b"\xc3(" * 500)).is_text
    assert not row_of(Message(b"abc\xff")).is_text
    keys = row_of(Message(b"x", keys=[f"k{number}" for number in range(99)])).keys
    assert len(keys) == 20


def test_filters() -> None:
    message = Message(b"one espresso", tags="hot", keys=["k1", "k2"], properties={"colour": "red"})
    for wanted in (
        SearchFilter(),
        SearchFilter(tag="hot"),
        SearchFilter(key="k2"),
        SearchFilter(text="esp"),
        SearchFilter(text="red"),
        SearchFilter(text="colour"),
    ):
        assert wanted.fits(message)
    for wanted in (
        SearchFilter(tag="ho"),
        SearchFilter(key="k"),
        SearchFilter(text="tea"),
        SearchFilter("hot", "k1", "tea"),
    ):
        assert not wanted.fits(message)


def test_places() -> None:
    assert place_of("0:17,3:4") == {0: 17, 3: 4}
    for wrong in ("", "0", "0:x", "0:1,", "-1:0", "0:" + "9" * 40, "٠:1"):
        with pytest.raises(BadValueError):
            place_of(wrong)
