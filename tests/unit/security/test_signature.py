"""Goal: a request is signed as RocketMQ's clients sign it, and the least change is seen.

Method: an example whose signature RocketMQ's own AclUtils made (tests/interop/test_users.py has its clients); every single bit
of fields and body flipped.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from commitmq.security.policy import SIGNATURE, is_signed, sign

FIELDS = {"AccessKey": "ann", "b": "orders", "a": "group", "e": "0", "i": "KEYS\x01k\x02"}
BODY = b"a body"
SECRET = "a-secret-of-ann"


def test_the_values_in_the_order_of_their_names_then_the_body() -> None:
    data = "ann" + "group" + "orders" + "0" + "KEYS\x01k\x02"
    expected = hmac.new(SECRET.encode(), data.encode() + BODY, hashlib.sha1).digest()
    assert base64.b64decode(sign(FIELDS, BODY, SECRET)) == expected


def test_a_signature_and_a_field_that_old_clients_add_do_not_count() -> None:
    signed = {**FIELDS, SIGNATURE: sign(FIELDS, BODY, SECRET)}
    assert is_signed(signed, BODY, SECRET)
    later = {**signed, "_UNIQUE_KEY_QUERY": "true"}
    assert not is_signed(later, BODY, SECRET)
    assert is_signed(later, BODY, SECRET, without="_UNIQUE_KEY_QUERY")


def test_every_flipped_bit_is_seen() -> None:
    signed = {**FIELDS, SIGNATURE: sign(FIELDS, BODY, SECRET)}
    for bit in range(8 * len(BODY)):
        changed = bytearray(BODY)
        changed[bit // 8] ^= 1 << bit % 8
        assert not is_signed(signed, changed, SECRET)
    for name, value in signed.items():
        for at in range(len(value)):
            for bit in range(7):
                other = value[:at] + chr(ord(value[at]) ^ 1 << bit) + value[at + 1 :]
                assert not is_signed({**signed, name: other}, BODY, SECRET), (name, at, bit)


@pytest.mark.parametrize("given", [{}, {SIGNATURE: ""}, {SIGNATURE: "é"}, {SIGNATURE: "AAAA"}, {SIGNATURE: "\ud800"}])
def test_what_is_no_signature_is_refused(given: dict[str, str]) -> None:
    assert not is_signed({**FIELDS, **given}, BODY, SECRET)


def test_text_that_is_not_unicode_can_be_signed() -> None:
    fields = {"a": "\ud800"}
    assert is_signed({**fields, SIGNATURE: sign(fields, b"", SECRET)}, b"", SECRET)
