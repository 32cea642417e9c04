"""The supervisor's events: readable descriptors and sockets, and signals."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import zmq

from commitmq.supervision.processes import HANDLED_SIGNALS


class EventLoop:
    """Calls handlers for readable descriptors and sockets."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._last: set[Any] = set()
        self._resting: dict[Any, float] = {}

    def watch(self, source: Any, handler: Callable[[], None], *, last: bool = False) -> None:
        """Call ``handler`` from :meth:`wait` whenever ``source`` (a descriptor or a ZeroMQ socket) can be read.
        ``last``: run after all other handlers, so that they do not wait for it.
        """
        self._handlers[source] = handler
        if last:
            self._last.add(source)
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: Any) -> None:
        self._last.discard(source)
        if self._handlers.pop(source, None) is not None and self._resting.pop(source, None) is None:
            self._poller.unregister(source)

    def rest(self, source: Any, rest_s: float) -> None:
        """Do not look at ``source`` for ``rest_s`` seconds."""
        if source not in self._resting:
            self._poller.unregister(source)
        self._resting[source] = time.monotonic() + rest_s

    def wait(self, timeout_ms: float) -> None:
        """Wait for the first event, ``timeout_ms`` at most, and run the handlers of all sources that have one."""
        now_s = time.monotonic()
        for source, until_s in list(self._resting.items()):
            if until_s <= now_s:
                del self._resting[source]
                self._poller.register(source, zmq.POLLIN)
            else:
                timeout_ms = min(timeout_ms, (until_s - now_s) * 1_000 + 1)
        events = self._poller.poll(max(0, int(timeout_ms)))
        for source, _ in sorted(events, key=lambda event: event[0] in self._last):
            handler = self._handlers.get(source)
            if handler is not None:  # an earlier handler of this round may have closed it
                handler()

    def catch_signals(self, handler: Callable[[str], None]) -> None:
        """Call ``handler`` with the name of SIGTERM or SIGINT. Either one ends a :meth:`wait`."""
        self._wakeup, wakeup_writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._wakeup.setblocking(False)
        wakeup_writer.setblocking(False)
        self._wakeup_writer = wakeup_writer
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _frame: handler(signal.Signals(received).name))
        # The keeper handles a closed terminal. A write to a closed terminal must not stop a node in the background.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)  # the keeper forks this process with them blocked
        self.watch(self._wakeup.fileno(), self._drain_wakeups)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
