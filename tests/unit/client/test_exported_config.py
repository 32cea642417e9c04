"""Goal: a document of settings is read whole or refused with its place, so that a bad file changes nothing.

Method: a good document, and the same one with a member that is wrong.
"""

from __future__ import annotations

from typing import Any

import pytest

from commitmq.client.admin_config import ExportedConfig, exported_settings, is_exported

TOPIC = {"name": "orders", "read_queues": 2, "write_queues": 4, "perm": 6, "attributes": {"message.type": "FIFO"}}
GROUP = {"name": "kitchen", "settings": {"retryMaxTimes": 3, "consumeEnable": False}}
OFFSET = {"group": "kitchen", "topic": "orders", "queue": 1, "offset": 7}
GOOD = {
    "format": "commitmq-config", "version": 1, "node": "n", "exported": "2026-11-27T03:00:00Z",
    "topics": [TOPIC], "groups": [GROUP], "offsets": [OFFSET],
}  # fmt: skip


def test_a_good_document_is_read() -> None:
    found = ExportedConfig.of(GOOD)
    assert found.topics == {"orders": {name: value for name, value in TOPIC.items() if name != "name"}}
    assert found.groups == {"kitchen": GROUP["settings"]}
    assert found.offsets == {("kitchen", "orders", 1): 7}
    assert ExportedConfig.of({**GOOD, "offsets": None}).offsets is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([], "the document must be an object, not []"),
        (
            {**GOOD, "format": "other"},
            "format must be 'commitmq-config', as `commitmq export config` writes it, not 'other'",
        ),
        ({**GOOD, "version": 2}, "version must be 1, the one that this program reads, not 2"),
        ({**GOOD, "secrets": []}, "the document has no member 'secrets'; there are"),
        ({**GOOD, "topics": None}, "topics must be a list, not None"),
        ({**GOOD, "topics": [TOPIC, TOPIC]}, "topics[1]: orders is there twice; leave one out"),
        ({**GOOD, "topics": [{**TOPIC, "perm": 8}]}, "topics[0].perm must be an integer from 0 to 7, not 8"),
        ({**GOOD, "topics": [{**TOPIC, "perm": True}]}, "topics[0].perm must be an integer from 0 to 7, not True"),
        (
            {**GOOD, "topics": [{**TOPIC, "read_queues": 0}]},
            "topics[0].read_queues must be an integer from 1 to 4096, not 0",
        ),
        ({**GOOD, "topics": [{**TOPIC, "name": "../x"}]}, "topics[0].name: "),
        ({**GOOD, "topics": [{**TOPIC, "attributes": {"a": 1}}]}, "topics[0].attributes must be an object with texts"),
        ({**GOOD, "groups": [{"name": 7}]}, "groups[0].name must be a name, not 7"),
        ({**GOOD, "groups": [{"name": "g"}]}, "groups[0].settings must be an object, not None"),
        ({**GOOD, "groups": [{**GROUP, "settings": {"x": 1}}]}, "groups[0].settings has no member 'x'"),
        (
            {**GOOD, "groups": [{**GROUP, "settings": {"retryMaxTimes": "many"}}]},
            "groups[0].settings: retryMaxTimes must be an integer from 0",
        ),
        ({**GOOD, "offsets": {}}, "offsets must be a list, not {}"),
        ({**GOOD, "offsets": [OFFSET, OFFSET]}, "offsets[1]: group kitchen has two offsets in queue 1 of orders"),
        ({**GOOD, "offsets": [{**OFFSET, "offset": -1}]}, "offsets[0].offset must be an integer from 0 to"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(wrong: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # its sentence is compared
        ExportedConfig.of(wrong)
    assert sentence in str(caught.value)


def test_what_the_node_makes_by_itself_is_left_out() -> None:
    assert is_exported("orders", system=False)
    assert not is_exported("orders", system=True)
    assert not is_exported("%RETRY%kitchen", system=False)
    assert not is_exported("%DLQ%kitchen", system=False)
    assert exported_settings({"groupName": "g", "retryMaxTimes": 1, "unknown": 2}) == {"retryMaxTimes": 1}
