"""Cases of one test by how often they are run: a few with each landing, all of them before a release."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def shared(cases: Iterable[Any], slow: int) -> list[Any]:
    """The first ``slow`` of ``cases`` for the slow suite, the others for the long one. A tuple is several arguments."""
    marks = pytest.mark.slow, pytest.mark.long
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*value, marks=marks[number >= slow]) for number, value in enumerate(values)]
