"""Appends to the log, and waits a moment for what an append needs: the next segment, or a buffer of the pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from commitmq import failpoints
from commitmq.control import DiskFlag, Word
from commitmq.errors import StoreError
from commitmq.store.log.append import Appended, PoolFullError, SegmentUnavailableError
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.writer.send_checks import Refusal

_RETRY_MS: Final = 200
_SEGMENT_PATIENCE_MS: Final = 1_000
_SEGMENT_LOOK_S: Final = 0.0005
_POOL_PATIENCE_MS: Final = 100


class PatientAppend:
    """``publish`` makes what was appended visible."""

    def __init__(self, context: WorkerContext, publish: Callable[[], None]) -> None:
        self._context = context
        self._control = context.control
        self._allocate = context.ringer("allocate")
        self._publish = publish

    def store(self, append: Callable[[], Appended]) -> Appended:
        """Append and publish. When a segment is missing, wait for it a moment, unless the disk is known to be full.

        Raises Refusal; then nothing is stored.
        """
        deadline = 0
        while True:
            try:
                if failpoints.ACTIVE:
                    failpoints.hit("writer.before_append")
                done = append()
                break
            except PoolFullError:
                deadline = deadline or monotonic_ms() + _POOL_PATIENCE_MS
                if monotonic_ms() >= deadline:
                    raise Refusal(
                        "SYSTEM_BUSY",
                        "the transient store pool is full: the disk is slower than the sends",
                        _RETRY_MS,
                    ) from None
                self._context.heartbeat()
                time.sleep(0.002)
            except SegmentUnavailableError as error:
                if self._control.get(Word.DISK_FLAGS) & DiskFlag.NO_SEGMENT:
                    raise Refusal(
                        "CREATE_MAPPED_FILE_FAILED",
                        "no space for the next segment of the log; reads work",
                        self._context.config.disk.check_interval_ms,
                    ) from None
                # A run may need more segments than allocate keeps ready; with preallocate_segments = 0 it keeps none.
                self._control.put(Word.SEGMENT_WANTED, error.base)
                self._allocate.ring()
                deadline = deadline or monotonic_ms() + _SEGMENT_PATIENCE_MS
                if monotonic_ms() >= deadline:
                    raise Refusal("CREATE_MAPPED_FILE_FAILED", "the next segment is not ready yet", _RETRY_MS) from None
                self._context.heartbeat()
                time.sleep(_SEGMENT_LOOK_S)
            except StoreError as error:
                raise Refusal("SYSTEM_ERROR", str(error)) from error
        if failpoints.ACTIVE:
            failpoints.hit("writer.after_append")
        self._publish()
        return done
