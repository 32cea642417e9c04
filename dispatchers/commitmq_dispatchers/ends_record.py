"""Decides when the ConsumeQueue dispatcher writes down which queues there are and where they end.

The file is :mod:`commitmq.store.queues.queue_ends`. Every recorded end must be on the device already: a start takes a
queue that ends before its record for damaged. So the ends are taken at one place of the log and kept until everything
below it is durable.

While messages are dispatched, a thread writes the record so that waiting consumers are not delayed: a sync takes as
long as the device needs. Only one thread runs at a time, and every operation that would make a record wrong waits for
it first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from commitmq.errors import StoreError
from commitmq.plugin.hookspecs import DispatcherView
from commitmq.store.log.expiry import list_bases
from commitmq.store.queues import queue_ends
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_ends import QueueEnds

# A start after a crash dispatches the log behind the record again: a fraction of a second's work.
_INTERVAL_BYTES: Final = 64 << 20
# With many queues a record takes longer to write: 4 KiB of log for each queue keep its share of the time small.
_INTERVAL_BYTES_A_QUEUE: Final = 4096

Queues = Callable[[], Iterable[ConsumeQueue | BatchConsumeQueue]]


class EndsRecord:
    """The record of one dispatcher's queues. A record that cannot be written is a warning: a start works without it."""

    def __init__(self, view: DispatcherView, queues: Queues) -> None:
        self._path = view.layout.queue_ends
        self._log = view.log
        self._folder = view.commit_log.folder
        self._queues = queues
        self._taken = -1
        self._interval = _INTERVAL_BYTES
        self._waiting: QueueEnds | None = None
        self._writer: threading.Thread | None = None

    def opened(self, position: int) -> None:
        """All queues were opened and cut at ``position``."""
        self._take(position)

    def flushed(self, position: int, durable: int) -> None:
        """The queues have all units below ``position``; those below ``durable`` are on the device."""
        if self._writer is not None and self._writer.is_alive():
            return
        if self._waiting is not None and durable >= self._waiting.position:
            self._save_behind()
        elif self._waiting is None and position - self._taken >= self._interval:
            self._take(position)
            if durable >= position:
                self._save_behind()

    def closed(self, position: int, durable: int) -> None:
        """The stop: nothing more is appended."""
        self.settle()
        if durable >= position:
            self._take(position)
            self._save(self._taken_out())

    def expires(self, min_offset: int) -> None:
        """Files whose last unit points below ``min_offset`` are about to go. Raises StoreError: then they must stay."""
        if any(0 <= queue.first_byte < queue.end_byte - queue.file_bytes for queue in self._queues()):
            self.settle()
            queue_ends.expect_expiry(self._path, min_offset)
            self._waiting, self._taken = None, -self._interval  # the next record has the remaining ones

    def _take(self, position: int) -> None:
        # Without a segment the log continues at its end, which is then its beginning. The folder is listed for this:
        # this process may have mapped nothing since the log was empty.
        log_start = next(iter(list_bases(self._folder)), position)
        ends = QueueEnds.at(position, log_start, self._queues())
        self._waiting, self._taken = ends, position
        self._interval = max(_INTERVAL_BYTES, len(ends.queues) * _INTERVAL_BYTES_A_QUEUE)

    def _taken_out(self) -> QueueEnds:
        assert self._waiting is not None
        ends, self._waiting = self._waiting, None
        return ends

    def _save_behind(self) -> None:
        ends = self._taken_out()
        self._writer = threading.Thread(target=self._save, args=(ends,), name="queue-ends", daemon=True)
        try:
            self._writer.start()
        except RuntimeError:  # no room for a thread
            self._writer = None
            self._save(ends)

    def settle(self) -> None:
        """Wait for the thread to end."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _save(self, ends: QueueEnds) -> None:
        try:
            ends.save(self._path)
        except (StoreError, MemoryError) as error:
            self._log.warning("the record of the queues' ends was not written", error=str(error) or repr(error))
