"""Goal: what the fork server imports costs no collections of what stays anyway, and workers collect again.

Method: the preloading of a module that makes many objects, with the collector's own counts.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from commitmq.supervision import forkserver


def test_nothing_is_collected_while_modules_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "many_objects.py").write_text("kept = [[] for _ in range(200_000)]\n", encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forkserver, "release_library_pages", lambda: None)
    began: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began.append(info["generation"])

    gc.callbacks.append(note)
    try:
        forkserver._preload(["many_objects"])
        frozen = gc.get_freeze_count()
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
        sys.modules.pop("many_objects", None)
    assert began == [2], "one collection, of everything, at the end"
    assert frozen > 200_000
    assert gc.isenabled()
