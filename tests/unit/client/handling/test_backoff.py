"""Goal: a back-off means what it says, and what is none is refused. So are middlewares and settings that are none.

Method: tables.
"""

from __future__ import annotations

from typing import Any

import pytest

from commitmq.client.handling.consume_result import LONGEST_S, check_backoff, delay_of
from commitmq.client.handling.settings import Settings, chained
from commitmq.client.message import Message


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (None, [None, None]),
        (3, [3, 3]),
        (0, [0, 0]),
        ([1, 2.5], [1, 2.5, 2.5]),
        (lambda times: 2**times, [1, 2, 4]),
    ],
)
def test_delays(backoff: Any, delays: list[float | None]) -> None:
    checked = check_backoff(backoff)
    assert [delay_of(checked, times) for times in range(len(delays))] == delays


@pytest.mark.parametrize("wrong", [-1, "10", [], [1, -1], ["x"], {}, object(), True])
def test_what_is_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match="backoff"):
        check_backoff(wrong)


def test_a_function_s_value_is_checked() -> None:
    with pytest.raises(ValueError, match="backoff"):
        delay_of(lambda times: -1, 0)


@pytest.mark.parametrize("long", [7_201, [10, 9_000], float("inf")])
def test_a_message_that_is_sent_back_waits_two_hours_at_most(long: Any) -> None:
    with pytest.raises(ValueError, match=r"at most 7200 seconds \(2 hours"):
        Settings(backoff=long)
    assert Settings(backoff=7_200).backoff == 7_200
    Settings(backoff=long, ordered=True)  # the consumer itself waits
    with pytest.raises(ValueError, match="at most 7200 seconds"):
        delay_of(lambda times: 7_201, 0, LONGEST_S)


def test_middleware_surrounds_the_handler() -> None:
    steps: list[str] = []

    def named(name: str) -> Any:
        def middleware(message: Message, following: Any) -> Any:
            steps.append(f"{name} begins")
            result = following(Message(message.body + name.encode()))
            steps.append(f"{name} ends")
            return result

        return middleware

    chain = chained(lambda message: steps.append(message.body.decode()), [named("a"), named("b")])
    assert chain(Message(b"x")) is None
    assert steps == ["a begins", "b begins", "xab", "b ends", "a ends"]
    for wrong in (3, None):
        with pytest.raises(ValueError, match="middleware"):
            chained(lambda message: None, [wrong])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "wrong",
    [{"workers": 0}, {"workers": 1 << 20}, {"max_unfinished": 0}, {"max_retries": -1}, {"max_unfinished_bytes": "x"},
     {"ordered": 1}, {"stop_timeout_s": -1}, {"max_unfinished_span": 0}],
)  # fmt: skip
def test_settings_are_checked(wrong: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)
