"""Goal: a message that cannot be moved takes no other one along.

Method: the rewriting of records is replaced by a function that refuses some of them.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from commitmq.store.log.run_check import MessageIllegalError
from commitmq.workers.runtime import run_making as module
from commitmq.workers.runtime.run_making import RunMaker

BAD = {3, 11, 12}


def test_only_the_message_that_breaks_a_limit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []
    made: list[tuple[list[int], list[bytes]]] = []

    def readdress(_: object, starts: NDArray[np.int64], __: object, more: list[bytes]) -> object:
        if BAD & set(starts.tolist()):
            raise MessageIllegalError("too many bytes")
        made.append((starts.tolist(), more))
        return object()

    monkeypatch.setattr(module, "readdress", readdress)
    maker = object.__new__(RunMaker)
    maker._report = lambda _, place: reported.append(place)
    maker._store_v6 = maker._properties_crc = False
    positions = np.arange(16)
    more = [b"%d" % one for one in range(16)]
    runs = list(maker._readdressed(1_000, np.empty(0, np.uint8), positions, "orders", 0, more))
    moved = [one for starts, _ in made for one in starts]
    assert moved == [one for one in range(16) if one not in BAD], "in their order"
    assert [text for _, added in made for text in added] == [more[one] for one in moved]
    assert len(runs) == len(made)
    assert reported == [1_003, 1_011, 1_012]
