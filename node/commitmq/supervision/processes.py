"""System calls about processes that the supervisor and the command line share: lock holders, pidfds, subreaper.

No function trusts a bare pid. A pid may be reused between looking and acting. So a process is first pinned by a pidfd
and then checked again (it still holds the lock, it still has the noted start time) before a signal goes through that
pidfd. Linux only (kernel 5.4 or later for pidfds that can be waited for).

CPU and memory of one process.

Memory is the proportional set size (PSS) without the mapped files of the store. So pages that workers share count once
in the sum, and the page cache of the log, which the kernel may take back at any time, does not count at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import re
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A mapping's first line in smaps (address range, permissions, offset, device, inode, path), or its Pss line.
_SMAPS = re.compile(rb"^(?:[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *([^\n]*)|Pss: +([0-9]+) kB)$", re.MULTILINE)

# Limits of a gauge of memory: its share of the time for measuring, how much of that time it may save up, how many
# processes it knows.
_LOOKING_SHARE = 0.1
_MAX_SAVED_MS = 500.0
_MAX_PROCESSES = 128
_FORGOTTEN_MS = 60_000


def cpu_seconds(pid: int) -> float | None:
    """User plus system time of process ``pid`` since it started; None when it is gone."""
    # Not by psutil: the supervisor samples every process again and again, and this is one small read.
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read(4096)
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def memory_bytes(pid: int, store: Path) -> int | None:
    """PSS of ``pid`` without mappings of files under ``store``; None when it is gone or this account may not look at it."""
    # Not by psutil: it makes an object of every mapping, and only the Pss lines count here.
    try:
        smaps = Path(f"/proc/{pid}/smaps").read_bytes()
    except OSError:
        return None
    inside = os.fsencode(store) + b"/"
    total_kib = 0
    counts = True
    for path, pss in _SMAPS.findall(smaps):
        if pss:
            total_kib += int(pss) if counts else 0
        else:
            counts = not path.startswith(inside)
    return total_kib * 1024 or None  # (an ended process that was not waited for yet has no mappings)


@dataclass(slots=True)
class CpuMeter:
    """CPU use of one process over the last two samples, in percent of one core."""

    pid: int = 0
    seconds: float = 0.0
    at_ms: int = 0
    percent: float = 0.0

    def sample(self, pid: int, now_ms: int) -> None:
        """Measure ``pid`` again at monotonic time ``now_ms``; a new pid starts from zero."""
        seconds = cpu_seconds(pid) if pid else None
        if seconds is None:
            self.pid, self.percent = 0, 0.0
            return
        if pid == self.pid and now_ms > self.at_ms:
            self.percent = round((seconds - self.seconds) * 100_000 / (now_ms - self.at_ms), 1)
        elif pid != self.pid:
            self.percent = 0.0
        self.pid, self.seconds, self.at_ms = pid, seconds, now_ms


class MemoryGauge:
    """Memory of processes, measured on request, and for a small share of the time.

    The kernel walks every page of a process to answer, which takes milliseconds each. A client that asks without a
    pause must not keep the supervisor from its workers, so between two measurements the last answer stands.
    """

    def __init__(self, store: Path, age_ms: int) -> None:
        """``age_ms``: the age from which an answer is measured again."""
        self._store = store
        self._age_ms = age_ms
        self._known: dict[int, tuple[int | None, float]] = {}  # pid -> bytes, when
        self._saved_ms = _MAX_SAVED_MS  # time for measuring
        self._at_ms = _clock_ms()

    def of(self, pid: int) -> int | None:
        """See :func:`memory_bytes`. A process is measured in any case when it is asked for the first time."""
        now_ms = _clock_ms()
        self._saved_ms = min(_MAX_SAVED_MS, self._saved_ms + (now_ms - self._at_ms) * _LOOKING_SHARE)
        self._at_ms = now_ms
        known = self._known.get(pid)
        if known is None or (now_ms - known[1] >= self._age_ms and self._saved_ms > 0):
            measured = memory_bytes(pid, self._store)
            self._at_ms = _clock_ms()
            self._saved_ms -= self._at_ms - now_ms
            known = self._known[pid] = (measured, self._at_ms)
            if len(self._known) > _MAX_PROCESSES:
                self._known = {one: said for one, said in self._known.items() if self._at_ms - said[1] < _FORGOTTEN_MS}
        return known[0]


def _clock_ms() -> float:
    return time.monotonic_ns() / 1e6


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


HANDLED_SIGNALS: Final = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""What stops a node. A process that is forked begins with them blocked, until it has set its own handlers."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let :data:`HANDLED_SIGNALS` wait in the meantime."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork(run: Callable[[], int], *keep: int) -> int:
    """Fork a process that calls ``run`` and ends with the exit code that it returns. Returns its pid; raises OSError.

    The child has the descriptors ``keep`` and the standard streams, and no other one. It never returns into the stack above,
    and runs no exit handlers. It has the caller's signal handlers and mask: fork within :func:`signals_held` where ``run``
    sets handlers. Tearing down the interpreter would only make its end longer.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        close_all_but(*keep)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def use_as(path: str | Path, flags: int, *fds: int) -> None:
    """Open ``path`` as each of the standard streams ``fds``."""
    opened = os.open(path, flags | os.O_CLOEXEC, 0o666)
    for fd in fds:
        os.dup2(opened, fd)
    os.close(opened)


def close_all_but(*keep: int) -> None:
    """Close all descriptors but ``keep`` and the standard streams."""
    bounds = [2, *sorted(keep), max(map(int, os.listdir("/proc/self/fd"))) + 1]
    for low, high in itertools.pairwise(bounds):
        os.closerange(low + 1, high)


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
    """When ``pid`` started, in ticks since boot: both name a process permanently. None if it is gone."""
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
