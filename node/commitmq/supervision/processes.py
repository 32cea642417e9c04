"""System calls about processes that the supervisor and the command line share: lock holders, pidfds, subreaper.

No function trusts a bare pid. A pid may be reused between looking and acting. So a process is first pinned by a pidfd
and then checked again (it still holds the lock, it still has the noted start time) before a signal goes through that
pidfd. Linux only (kernel 5.4 or later for pidfds that can be waited for).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_SWITCH_S = 0.0005
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
# struct flock of 64-bit Linux: type, whence, start, length, pid, and the padding the kernel writes too.
_FLOCK = struct.Struct("hhqqi4x")


def become_subreaper() -> None:
    """Make this process the parent of orphaned grandchildren, so that it can wait for them. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Name shown by ``ps`` and ``top``; the kernel keeps 15 bytes of it."""
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_NAME, name.encode()[:15])


def pass_interpreter_on() -> None:
    """A thread of this process that runs gives the interpreter to one that waits after half a millisecond. Python's own 5 ms
    are longer than a message takes: with them the gate (:mod:`commitmq.network.gate`) holds up the loop beside it.
    """
    sys.setswitchinterval(_SWITCH_S)


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def release_library_pages() -> None:
    """Give the kernel back the pages of program files that this process has mapped and never changed. They stay in the page
    cache, and one that is needed again is mapped again.

    Only for a process with one thread. Does nothing where the kernel refuses, or does not tell the mappings.
    """
    # Linux 6.18 maps whole folios around a page that is touched: of LLVM's library alone, which compiled kernels need only
    # while they are loaded, 50 to 90 MB.
    libc = ctypes.CDLL(None)
    begin, end, is_file = 0, 0, False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # the head of a mapping: range, permissions, offset, device, inode, path
            begin, end = (int(address, 16) for address in name.split("-"))
            fields = rest.split(None, 4)
            is_file = len(fields) == 5 and fields[4].startswith("/") and fields[0] in ("r--p", "r-xp")
        elif name == "Anonymous:" and is_file and rest.split()[0] == "0":  # it has no page of its own, so none is lost
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED))


def lock_holder(path: Path) -> int | None:
    """Pid of the process that holds a POSIX lock on ``path``; None when no process does, 0 when the system hides it.

    The holder itself must not call this: closing any descriptor of a file drops all of the process's locks on it.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def kill_lock_holder(path: Path) -> int | None:
    """SIGKILL the process that holds ``path``, and no other. Returns its pid, None when there was none to kill."""
    pid = lock_holder(path)
    if not pid or pid == os.getpid():
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        # The pidfd pins the process that has this pid now. If the lock still names the pid, that is the holder and no
        # newcomer.
        if lock_holder(path) != pid:
            return None
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        wait_for_exit(pidfd, 5.0)
    except ProcessLookupError:
        return None
    finally:
        os.close(pidfd)
    return pid


def free_locks(paths: Iterable[Path], patience_s: float) -> list[tuple[str, int]]:
    """Wait until no process holds any of ``paths``; SIGKILL the holders that are left after ``patience_s`` seconds.

    Returns ``(file name, pid)`` of each process killed. Raises BlockingIOError when a lock stays held even so (its
    holder is in another pid namespace, or in an uninterruptible system call).
    """
    deadline = time.monotonic() + patience_s
    held = list(paths)
    pause_s = 0.005
    while held := [path for path in held if lock_holder(path) is not None]:
        if time.monotonic() >= deadline:
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.1)
    killed = [(path.name, pid) for path in held if (pid := kill_lock_holder(path)) is not None]
    for path in held:
        if (pid := lock_holder(path)) is not None:
            raise BlockingIOError(f"{path} stays locked by process {pid or 'in another pid namespace'}")
    return killed


def wait_for_exit(pidfd: int, timeout_s: float | None) -> bool:
    """True once the process behind ``pidfd`` has ended; False after ``timeout_s`` seconds (None waits for ever)."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


def start_time_ticks(pid: int) -> int | None:
    """When ``pid`` started, in ticks since boot: pid and start time together name one process for good. None if it is
    gone.
    """
    # Not by psutil: it gives seconds of the wall clock, which a changed clock moves, and the keeper stays light.
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the name in parentheses and may contain anything; the text behind its last ')' is plain.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def open_process(pid: int, started_ticks: int | None) -> int | None:
    """A pidfd of process ``pid`` if it is still the one that started at ``started_ticks``, else None."""
    if pid <= 0:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    # A process that has ended but was not waited for yet still has its pid and its start time.
    if wait_for_exit(pidfd, 0) or (started_ticks is not None and start_time_ticks(pid) != started_ticks):
        os.close(pidfd)
        return None
    return pidfd
