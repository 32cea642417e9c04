"""Goal: changes of topics' attributes are read and refused as RocketMQ does. Method: texts, with RocketMQ's sentences."""

from __future__ import annotations

import pytest

from commitmq_plugins.rocketmq.broker.admin_store import AttributesError, merged, parse


def test_changes_are_read_with_their_signs() -> None:
    assert parse(None) == parse("") == {}
    assert parse("+message.type=FIFO,-reserve.time") == {"+message.type": "FIFO", "-reserve.time": ""}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("message.type=FIFO", "add/alter attribute format is wrong: message.type"),
        ("+message.type", "delete attribute format is wrong: +message.type"),
        ("+message.type=", "kv string format wrong."),
        ("-a,-a", "key duplication: -a"),
    ],
)
def test_a_wrong_text_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(AttributesError, match=sentence.replace("+", r"\+")):
        parse(text)


def test_a_new_topic_takes_additions_only() -> None:
    assert merged(None, {"+queue.type": "BatchCQ"}) == {"queue.type": "BatchCQ"}
    with pytest.raises(AttributesError, match="only add attribute is supported while creating topic"):
        merged(None, {"-reserve.time": ""})


def test_known_attributes_stay_and_are_edited() -> None:
    known = {"storage.type": "log", "message.type": "NORMAL"}
    assert merged(known, {"+message.type": "FIFO"}) == {"storage.type": "log", "message.type": "FIFO"}
    assert merged(known, {"-message.type": ""}) == {"storage.type": "log"}
    for changes, sentence in (
        ({"+queue.type": "BatchCQ"}, "attempt to update an unchangeable attribute"),
        ({"-reserve.time": ""}, "attempt to delete a nonexistent key"),
        ({"+colour": "red"}, "unsupported key: colour"),
    ):
        with pytest.raises(AttributesError, match=sentence):
            merged(known, changes)
