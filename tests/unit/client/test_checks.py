"""Goal: a time, an offset or a callback that makes no sense is refused where it is given, and its name is told.

Method: wrong values of each kind go to each client's constructor and methods; no node is there.
"""

from __future__ import annotations

import math
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from commitmq import Admin, Consumer, Producer
from commitmq.client import checks
from commitmq.client.receiving.assignment import check_start

NOBODY = "tcp://127.0.0.1:9"


@pytest.mark.parametrize("value", [0, -1, math.nan, -math.inf, "1", None, True, Decimal(1), [1]])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        checks.seconds("timeout_s", value)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(3), math.inf, 1e300])
def test_times_are_bounded(value: Any) -> None:
    assert 0 < checks.seconds("timeout_s", value) <= checks.MOST_SECONDS


@pytest.mark.parametrize("value", [-1, 1 << 63, 10**30, 1.5, math.nan, "1", None])
def test_what_is_no_offset_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="an offset must be"):
        checks.offset("an offset", value)


@pytest.mark.parametrize("start", [-1, 10**30, datetime.min, "first", 1.5, True])
def test_what_is_no_start_is_refused(start: Any) -> None:
    with pytest.raises(ValueError, match="start"):
        check_start(start)


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout_s": math.nan},
        {"timeout_s": "x"},
        {"auto_commit_interval_s": math.nan},
        {"auto_commit_interval_s": -1},
        {"rebalance_timeout_s": "x"},
        {"max_poll_interval_s": math.nan},
        {"max_pull_bytes": 0},
        {"max_pull_bytes": "x"},
        {"on_assign": 1},
        {"on_revoke": "x"},
    ],
    ids=repr,
)
def test_a_consumers_settings_are_checked_before_it_connects(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Consumer("topic", group="group", node=NOBODY, **settings)


@pytest.mark.parametrize("make", [Producer, Admin])
def test_the_others_check_their_time(make: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        make(NOBODY, timeout_s=math.nan)
    with make(NOBODY, timeout_s=math.inf):
        pass
