"""Cases of one test by how often they are run: a few with each landing, all of them before a release."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def shared(cases: Iterable[Any], slow: int) -> list[Any]:
    """The first ``slow`` of ``cases`` for the slow suite, the others for the long one."""
    marks = pytest.mark.slow, pytest.mark.long
    return [pytest.param(case, marks=marks[number >= slow]) for number, case in enumerate(cases)]
