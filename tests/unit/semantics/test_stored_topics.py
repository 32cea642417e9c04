"""Goal: a stored message is its topic's, and where it waits in a topic of the node, also that of the one it was sent to.

Method: examples of each topic in which messages wait, and of one that a client wrote.
"""

from __future__ import annotations

from commitmq.format.constants import WAITING_TOPICS
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.retry import topics_of
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import DISCARD_TOPIC, HALF_TOPIC


def test_messages_of_others_wait_in_these_topics() -> None:
    assert {SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, DISCARD_TOPIC} == WAITING_TOPICS


def test_a_message_that_waits_is_of_both_topics() -> None:
    real = {"REAL_TOPIC": "orders"}
    for topic in (*WAITING_TOPICS, "%DLQ%CMQ_UNDELIVERED"):
        assert topics_of(topic, real) == (topic, "orders")
        assert topics_of(topic, {}) == (topic,)
    assert topics_of("mine", real) == ("mine",), "a client may write that property"
