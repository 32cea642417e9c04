"""Goal: a group that pops finds its retries under the names that RocketMQ's KeyBuilder gives them, of either form.

Method: a table of the settings enableRetryTopicV2 and retrieveMessageFromPopRetryTopicV1.
"""

from __future__ import annotations

import pytest

from commitmq.config import PopConfig
from commitmq.semantics.pop import USUAL_NAMES, RetryNames, retry_flag, topic_of_flag
from commitmq.semantics.retry import popped_topic

V1, V2 = "%RETRY%g_orders", "%RETRY%g+orders"


@pytest.mark.parametrize(
    ("v2", "reads_v1", "written", "read"),
    [
        (False, True, V1, (V1,)),
        (False, False, V1, (V1,)),
        (True, True, V2, (V2, V1)),
        (True, False, V2, (V2,)),
    ],
)
def test_the_settings_name_the_topics(v2: bool, reads_v1: bool, written: str, read: tuple[str, ...]) -> None:
    names = RetryNames.of(PopConfig(retry_topics_v2=v2, read_retry_topics_v1=reads_v1))
    assert names.written("orders", "g") == written
    assert names.read("orders", "g") == read
    for lot in range(4):
        order = names.in_turn("orders", "g", lot)
        assert sorted(order) == sorted(read)
        assert order[0] == (read[0] if lot % 2 else read[-1]), "an even lot begins with the first form, as in RocketMQ"


def test_the_flag_of_a_receipt_handle_is_the_form() -> None:
    assert RetryNames.of(PopConfig()) == USUAL_NAMES
    assert [retry_flag(name) for name in ("orders", V1, V2)] == [0, 1, 2]
    assert [topic_of_flag("orders", "g", flag) for flag in range(3)] == ["orders", V1, V2]
    assert popped_topic(V1, "g") == popped_topic(V2, "g") == popped_topic("orders", "g") == "orders"
