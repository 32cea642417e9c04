"""Syncs some queues in a thread, so that waiting consumers are not delayed.

An fdatasync of a queue that has grown waits for the file system's journal, and so for all other writes on their way to
the device: beside an asynchronous flush of the log it took 75 ms, in which nothing was dispatched.

The loop hands over separate descriptors (a queue's own may be closed meanwhile, and its files deleted) and the
durable position that the sync will reach. Units appended meanwhile wait for the next sync. The thread touches nothing
else, and the loop that started it reads the result after its end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.store.queues.queue_files import QueueFiles, sync_error

_FOLDER: Final = "queue_folder"


class BackgroundSync:
    """One sync."""

    def __init__(self, queues: list[QueueFiles], folders: set[str]) -> None:
        """Take over the unsynced files of ``queues`` and the names in ``folders``: they count as synced from now on.

        Raises StoreError when a descriptor cannot be opened; then nothing was taken over.
        """
        self._durable = (0, 0)
        self._error: BaseException | None = None
        self._files: list[tuple[str, int]] = []
        try:
            for queue in queues:
                self._files += [(queue.place, fd) for fd in queue.unsynced_descriptors()]
            names = folders.union(*(queue.folders_to_sync() for queue in queues))
            # Deepest folder first: a folder's durable name is worth nothing before its content is durable.
            for folder in sorted(names, key=lambda path: path.count("/"), reverse=True):
                # A folder that was deleted meanwhile, with its topic, has no names to keep.
                with contextlib.suppress(FileNotFoundError):
                    self._files.append((_FOLDER, disk.open_folder(folder)))
        except OSError as error:
            self._close()
            raise sync_error(error, "") from error
        except StoreError:
            self._close()
            raise
        for queue in queues:
            queue.hand_over_unsynced()
        self._thread = threading.Thread(target=self._run, name="queue-sync", daemon=True)

    def start(self, durable: tuple[int, int]) -> None:
        """Begin. ``durable``: ``(position, timestamp)`` below which everything is on the device if this succeeds."""
        self._durable = durable
        try:
            self._thread.start()
        except RuntimeError:  # no room for a thread: the loop waits, as it would without one
            self._run()

    def _run(self) -> None:
        try:
            for place, fd in self._files:
                if failpoints.ACTIVE and place != _FOLDER:
                    failpoints.hit(f"{place}.before_fdatasync")
                disk.sync(fd, place, metadata=place == _FOLDER)
        except BaseException as error:
            # Any error counts: a sync that did not happen must not be reported as durable.
            self._error = error
        finally:
            self._close()

    def _close(self) -> None:
        for _, fd in self._files:
            os.close(fd)
        self._files.clear()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> tuple[int, int]:
        """Wait for the end: the durable position and timestamp. Raises StoreError when something could not be synced."""
        self.join()
        if self._error is not None:
            reason = getattr(self._error, "strerror", None) or repr(self._error)
            raise StoreError(f"cannot flush the queue: {reason}") from self._error
        return self._durable
