"""Goal: a plain message's properties get what a broker adds, byte for byte as by a dictionary; all else is left to that.

Method: any names and values (hypothesis) against the encoder of properties; a table of messages that are not plain.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.format.properties import decode_properties, encode_properties
from commitmq_plugins.rocketmq.broker import runs
from commitmq_plugins.rocketmq.broker.runs import PlainProperties

MARKS = {"CLUSTER": "100% ours", "MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=12)
NAMES = st.sampled_from(["TAGS", "KEYS", "WAIT", "a%sb", "%", "KEY", "x", "traceContext"]) | TEXT


@given(st.dictionaries(NAMES, TEXT, max_size=6), TEXT, st.booleans())
def test_they_are_those_of_the_dictionary(others: dict[str, str], unique: str, waits: bool) -> None:
    given_ = {**others, "UNIQ_KEY": unique, **({} if waits else {"WAIT": "false"})}
    text = "".join(f"{name}\x01{value}\x02" for name, value in given_.items())
    properties = PlainProperties(MARKS)
    for _ in range(2):  # a form that is made, and one that is found
        found = properties.completed(text)
        if not runs._NOT_PLAIN.isdisjoint(given_) or not MARKS.keys().isdisjoint(given_):
            assert found is None
            continue
        assert found is not None
        assert found.encoded == encode_properties({**decode_properties(text.encode()), **MARKS})
        assert found.unique == unique
        assert found.waits == (given_.get("WAIT") != "false")


OTHERS = {
    "none": "",
    "no key": "TAGS\x01a\x02",
    "open": "UNIQ_KEY\x01K",
    "no value": "UNIQ_KEY\x01K\x02TAGS\x01\x02",
    "no name": "UNIQ_KEY\x01K\x02\x01a\x02",
    "no pair": "UNIQ_KEY\x01K\x02TAGS\x02",
    "twice": "UNIQ_KEY\x01K\x02UNIQ_KEY\x01L\x02",
    "delayed": "UNIQ_KEY\x01K\x02DELAY\x013\x02",
    "half": "TRAN_MSG\x01true\x02UNIQ_KEY\x01K\x02",
    "timer": "UNIQ_KEY\x01K\x02TIMER_DELIVER_MS\x011\x02",
    "popped": "UNIQ_KEY\x01K\x02POP_CK\x011 2\x02",
    "waited": "UNIQ_KEY\x01K\x02TIMER_OUT_MS\x011\x02",
    "of the node": "UNIQ_KEY\x01K\x02INNER_NUM\x011\x02",
    "a checksum": "UNIQ_KEY\x01K\x02__CRC32#\x011\x02",
    "a request": "UNIQ_KEY\x01K\x02REPLY_TO_CLIENT\x01c\x02",
    "a mark": "UNIQ_KEY\x01K\x02TRACE_ON\x01false\x02",
    "long names": "UNIQ_KEY\x01K\x02" + "n" * 3_000 + "\x01v\x02",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_plain_is_left(name: str) -> None:
    assert PlainProperties(MARKS).completed(OTHERS[name]) is None


def test_names_that_clients_invent_take_bounded_memory() -> None:
    properties = PlainProperties(MARKS)
    for number in range(3 * runs._MAX_FORMS):
        assert properties.completed(f"UNIQ_KEY\x01K\x02n{number}\x01v\x02") is not None
    assert len(properties._forms) <= runs._MAX_FORMS
