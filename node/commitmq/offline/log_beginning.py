"""Checks that the log of a stopped store begins where it must: its first segments may only be missing if they expired.

A start decides by the same rules (:mod:`commitmq.store.recovery.store_recovery`); offline verbs must not make it forget them.
"""

from __future__ import annotations

from collections.abc import Sequence

from commitmq.errors import StoreError
from commitmq.format.file_names import segment_name
from commitmq.offline.held_store import HeldStore
from commitmq.store.queues.queue_ends import QueueEnds, lost_beginning
from commitmq.store.recovery import abort_file
from commitmq.store.recovery.sidecar import Sidecar


def trusted_ends(store: HeldStore) -> QueueEnds | None:
    """The record of the queues' ends, if no other program used the store since it was written."""
    sidecar = Sidecar.load(store.layout.sidecar)
    if sidecar is None or not sidecar.agrees_with(
        store.layout.checkpoint,
        segment_bytes=store.config.commit_log.segment_bytes,
        previous=abort_file.read_token(store.layout.abort),
    ):
        return None
    return QueueEnds.load(store.layout.queue_ends)


def missing_beginning(store: HeldStore, bases: Sequence[int]) -> str:
    """A message when segments are missing before the first of ``bases``, else "". Raises StoreError."""
    ends = trusted_ends(store)
    return lost_beginning(store.layout, ends, bases[0]) if bases and ends is not None else ""


def refuse_missing_beginning(store: HeldStore, bases: Sequence[int]) -> None:
    """Raise StoreError when segments are missing before the first of ``bases``."""
    why = missing_beginning(store, bases)
    if why:
        raise StoreError(f"{why}. Nothing was changed", path=store.layout.commit_log / segment_name(bases[0]))
