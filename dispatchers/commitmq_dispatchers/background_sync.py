"""A sync of some queues in a thread, so that nobody waits for it who waits for messages.

An fdatasync of a queue that has grown waits for the file system's journal, and so for whatever else is on its way to the
device: beside an asynchronous flush of the log that was 75 ms, in which nothing was dispatched.

The loop hands over descriptors of its own for it (a queue's may be closed meanwhile, its files be deleted) and what is
durable afterwards. What is appended meanwhile waits for the next sync. The thread touches nothing else, and whoever
began it reads the result after its end.
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
        """Take over what ``queues`` have not synced, and the names in ``folders``: they count as synced from now on.

        Raises StoreError when a descriptor cannot be had, and has taken nothing over then.
        """
        self._durable = (0, 0)
        self._error: BaseException | None = None
        self._files: list[tuple[str, int]] = []
        try:
            for queue in queues:
                self._files += [(queue.place, fd) for fd in queue.unsynced_descriptors()]
            names = folders.union(*(queue.folders_to_sync() for queue in queues))
            # The deepest first: a folder's name is worth nothing before what it holds.
            for folder in sorted(names, key=lambda path: path.count("/"), reverse=True):
                # One that was deleted meanwhile, with its topic, has no names to keep.
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
        """Begin. ``durable``: ``(position, timestamp)`` below which everything is on the device when this has succeeded."""
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
            # Whatever it was: what did not happen must not be called durable.
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
        """Wait for the end: what is durable now. Raises StoreError when something could not be synced."""
        self.join()
        if self._error is not None:
            reason = getattr(self._error, "strerror", None) or repr(self._error)
            raise StoreError(f"cannot flush the queue: {reason}") from self._error
        return self._durable
