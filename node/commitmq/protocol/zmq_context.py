"""The ZeroMQ context of a process: one I/O thread for all its clients, ended when the last of them is closed.

It belongs to the process that made it: a forked child makes its own, and :func:`check_fork` refuses a client of the parent.
"""

from __future__ import annotations

import os
import sys
import threading

import zmq

from commitmq.errors import CommitMQError

ZmqContext = zmq.Context[zmq.Socket[bytes]]

_context_lock = threading.Lock()
_context: ZmqContext | None = None
_context_users = 0
_context_pid = 0


def _forget_context() -> None:
    """In a forked child: the context belongs to the parent, and the lock may be held by a thread that does not exist
    here.
    """
    global _context_lock, _context
    _context_lock = threading.Lock()
    _context = None


os.register_at_fork(after_in_child=_forget_context)


def acquire_context() -> ZmqContext:
    """The context all clients of this process share; pair with :func:`release_context`."""
    global _context, _context_users, _context_pid
    with _context_lock:
        if _context is None or _context_pid != os.getpid():
            # After a fork the parent's context is unusable: its I/O thread does not exist here.
            _context = zmq.Context(io_threads=1)
            _context_users = 0
            _context_pid = os.getpid()
        _context_users += 1
        return _context


def release_context() -> None:
    """Give the context back. The last user ends it (all sockets must be closed by then)."""
    global _context, _context_users
    if sys.is_finalizing():
        return  # a thread that no longer runs may hold the lock; the process's end closes everything
    with _context_lock:
        if _context_pid != os.getpid() or _context is None:
            return
        _context_users -= 1
        if _context_users:
            return
        context, _context = _context, None
    context.term()  # waits for the I/O thread: without the lock


def check_fork(pid: int, what: str) -> None:
    """Raise CommitMQError when this process is not the one that made ``what``."""
    if pid != os.getpid():
        raise CommitMQError(
            f"this {what} was made before a fork, in process {pid}; its connections and threads do not exist in"
            f" process {os.getpid()}. Make a new {what} in the child."
        )
