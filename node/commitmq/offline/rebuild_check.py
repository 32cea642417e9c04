"""Verifies a store after a rebuild, because a rebuild that reports nothing must have left a sound store.

A log may hold records that no queue can show: two records of one queue with the same queue offset, or damage between
records.
"""

from __future__ import annotations

from dataclasses import replace

from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import KINDS, Rebuilt
from commitmq.offline.runner import Progress, Runner, run_here, silent
from commitmq.offline.verify import verify

_PREFIXES = {"queues": "queue.", "index": "index."}


def checked(
    store: HeldStore,
    done: Rebuilt,
    kinds: tuple[str, ...] = KINDS,
    progress: Progress = silent,
    *,
    runner: Runner = run_here,
) -> Rebuilt:
    """``done`` with the findings of ``store verify`` for the log and the rebuilt ``kinds``. Raises StoreError."""
    report = verify(store, progress, runner=runner)
    others = tuple(prefix for kind, prefix in _PREFIXES.items() if kind not in kinds)
    left = [one for one in report.findings if not one.is_note and not (others and one.kind.startswith(others))]
    lines = [f"{one.kind}: {one.file} at {one.offset}: {one.detail}" for one in left]
    return replace(done, left=(*lines, *([f"and {report.untold} more"] if report.untold else [])))
