"""Goal: a table of topics that a death took away between two renames refuses no start; one that somebody deleted does.

Method: what a start compares, on a store of one queue whose table is missing, with and without the file that was to replace
it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.workers.recovery import _compare_topics


def test_a_death_between_the_renames_of_the_table_refuses_no_start(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    for folder in (layout.config, layout.own, layout.consume_queue / "orders" / "0"):
        folder.mkdir(parents=True)
    (layout.consume_queue / "orders" / "0" / f"{0:020d}").write_bytes(bytes(20))
    (layout.config / "topics.json.bak").write_bytes(b"{}")
    context = SimpleNamespace(layout=layout, log=get_log("test"))
    with pytest.raises(StoreError, match="table of topics is missing"):
        _compare_topics(context)  # type: ignore[arg-type]
    (layout.config / "topics.json.new").write_bytes(b"{}")
    _compare_topics(context)  # type: ignore[arg-type]
