"""Goal: a message that cannot be moved takes no other one along; it becomes what fits, or is set aside with its place.

Method: the rewriting of records is replaced by a function that refuses some of them, or fails on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from commitmq.semantics.retry import UNDELIVERED_TOPIC
from commitmq.store.log.readdressing import NewAddress
from commitmq.store.log.run_check import MessageIllegalError
from commitmq.workers.runtime import run_making as module
from commitmq.workers.runtime.run_making import RunMaker

BAD = {3, 11, 12}
TIMES = b"TIMER_ENQUEUE_MS\x01%d\x02TIMER_DEQUEUE_MS\x019\x02"
AIM = NewAddress(b"orders", 0, store_v6=False, properties_crc=False)


class Made:
    """A maker of runs whose records 3, 11 and 12 are bad: ``takes`` says as what they are taken all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception, takes: str = "nothing") -> None:
        self.aside: list[tuple[int, str]] = []
        self.made: list[tuple[list[int], bytes, Sequence[bytes] | None]] = []

        def readdress(
            _: object, starts: NDArray[np.int64], aim: NewAddress, more: Sequence[bytes] | None = None
        ) -> object:
            form = "dead" if more is None else "whole" if b"ENQUEUE" in more[0] else "light"
            if BAD & set(starts.tolist()) and form != takes:
                raise error
            self.made.append((starts.tolist(), aim.topic, more))
            return object()

        monkeypatch.setattr(module, "readdress", readdress)
        maker = object.__new__(RunMaker)
        maker._report = lambda why, place: self.aside.append((place, why))
        maker._store_v6 = maker._properties_crc = False
        more = [TIMES % one for one in range(16)]
        self.runs = maker._readdressed(1_000, np.empty(0, np.uint8), np.arange(16), AIM, more)

    def numbers(self, topic: str = "orders") -> list[int]:
        return [one for starts, name, _ in self.made if name == topic.encode() for one in starts]


@pytest.mark.parametrize("error", [MessageIllegalError("too many bytes"), OverflowError("a number"), KeyError("x")])
def test_only_the_message_that_cannot_be_moved_is_set_aside(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    made = Made(monkeypatch, error)
    good = [one for one in range(16) if one not in BAD]
    assert made.numbers() == good, "in their order"
    added = [one for _, _, more in made.made for one in more or ()]
    assert added == [TIMES % one for one in good]
    assert [place for _, _, places in made.runs for place in places] == [1_000 + one for one in good]
    assert [place for place, _ in made.aside] == [1_003, 1_011, 1_012]
    assert all(why for _, why in made.aside)


def test_what_is_of_the_process_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="disk"):
        Made(monkeypatch, OSError("the disk"))


def test_a_message_goes_without_what_is_optional_or_becomes_a_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    light = Made(monkeypatch, MessageIllegalError("too many bytes"), "light")
    assert sorted(light.numbers()) == list(range(16))
    assert [more for starts, _, more in light.made if set(starts) & BAD] == [[b"TIMER_DEQUEUE_MS\x019\x02"]] * 3
    dead = Made(monkeypatch, MessageIllegalError("too many bytes"), "dead")
    assert dead.numbers(UNDELIVERED_TOPIC) == sorted(BAD)
    assert [more for _, topic, more in dead.made if topic != b"orders"] == [None] * 3
    assert light.aside == dead.aside == []
