"""Counting what the kernel is asked for, and what the processor executes, without timing anything: ptrace through ctypes.

What was tried for system calls, and why it is this: ``strace -c`` counts the same but is a package of its own, and a test
that is skipped where it is missing guards nothing; ``/proc/PID/io`` counts only reads and writes, none of the waits and
wake-ups that a send pays for; the tracepoint ``raw_syscalls`` needs a privilege; ``voluntary_ctxt_switches`` depend on
which process happens to be faster. For instructions: hardware counters are missing in most virtual machines (here too),
and valgrind is a package again, under which everything takes minutes. ptrace needs Linux and nothing else.

Run as a program, because every child that is waited for here would be missing to the one who calls::

    python ptrace.py calls FILE PID…     counts system calls of those processes and of all their threads
    python ptrace.py steps FILE PROGRAM… counts the instructions of PROGRAM between marks

Both write JSON to FILE. The traced say themselves where a part begins: :func:`mark` is a system call that does nothing, seen
here in the order in which all of them run. ``mark(END)`` ends the tracing; a tracer that dies lets the traced go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import struct
import sys
from collections import defaultdict
from pathlib import Path

END = 0
_MARK = 0x4D51_0000  # no process group has such a number
_MARK_CALL = 121  # getpgid

# The numbers of x86-64. A call without a name here is told by its number.
NAMES = {
    0: "read", 1: "write", 3: "close", 5: "fstat", 7: "poll", 9: "mmap", 10: "mprotect", 11: "munmap", 12: "brk",
    16: "ioctl", 17: "pread64", 18: "pwrite64", 20: "writev", 25: "mremap", 28: "madvise", 39: "getpid", 42: "connect",
    44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 53: "socketpair", 72: "fcntl", 74: "fsync",
    75: "fdatasync", 121: "getpgid", 202: "futex", 228: "clock_gettime", 230: "clock_nanosleep", 232: "epoll_wait",
    233: "epoll_ctl", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
}  # fmt: skip
_INTO = {"read", "recvfrom", "recvmsg", "pread64"}
_OUT_OF = {"write", "writev", "pwrite64", "sendto", "sendmsg"}

_TRACEME, _SYSCALL, _SINGLESTEP, _CONT = 0, 24, 9, 7
_SEIZE, _INTERRUPT, _LISTEN, _SYSCALL_INFO = 0x4206, 0x4207, 0x4208, 0x420E
_GETREGS, _SETOPTIONS = 12, 0x4200
_SYSGOOD, _CLONE = 1, 8
_EVENT_STOP = 128
_WALL = 0x4000_0000
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_ENTRY, _EXIT = 1, 2
_REGISTERS = 27  # unsigned longs of user_regs_struct; rip is the 17th

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def mark(number: int) -> None:
    """Say to whoever traces this process that part ``number`` begins, or with END that nothing more is to be counted."""
    with contextlib.suppress(ProcessLookupError):
        os.getpgid(_MARK + number)


def why_not() -> str:
    """Why this machine cannot count so; empty when it can."""
    if platform.machine() != "x86_64":
        return f"the tracer knows the system calls and registers of x86-64, not of {platform.machine()}"
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        return "" if _libc.ptrace(_SEIZE, child, None, None) == 0 else f"ptrace: {os.strerror(ctypes.get_errno())}"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _ptrace(request: int, thread: int, data: int = 0, address: int = 0) -> bool:
    """False when the thread is gone. Raises OSError."""
    if _libc.ptrace(request, thread, address, data) >= 0:
        return True
    number = ctypes.get_errno()
    if number == 3:  # ESRCH
        return False
    raise OSError(number, f"ptrace {request:#x} of {thread}: {os.strerror(number)}")


class CallCounter:
    """Counts by part, process, kind of thread (``io``: ZeroMQ's own; ``main``: all others) and name of the call."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.bytes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._part = -1
        self._threads: dict[int, tuple[int, str]] = {}
        self._inside: dict[int, str] = {}
        self._info = ctypes.create_string_buffer(128)

    def run(self, pids: list[int]) -> None:
        """Trace until somebody calls ``mark(END)``."""
        for pid in pids:
            for name in os.listdir(f"/proc/{pid}/task"):
                thread = int(name)
                if _ptrace(_SEIZE, thread, _SYSGOOD | _CLONE):
                    self._threads[thread] = self._who(thread)
                    _ptrace(_INTERRUPT, thread)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            thread, status = os.waitpid(-1, _WALL)
            if not os.WIFSTOPPED(status):
                self._inside.pop(thread, None)
                continue
            number, event = os.WSTOPSIG(status), status >> 16
            if number == _SYSCALL_STOP:
                if self._note(thread):
                    return
                _ptrace(_SYSCALL, thread)
            elif event == _EVENT_STOP:
                stopped = number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
                _ptrace(_LISTEN if stopped else _SYSCALL, thread)
            else:
                _ptrace(_SYSCALL, thread, 0 if event or number == signal.SIGTRAP else number)

    def _note(self, thread: int) -> bool:
        """Count one entry or exit; true at the end."""
        info = self._info
        if not _ptrace(_SYSCALL_INFO, thread, ctypes.addressof(info), len(info)):
            return False
        kind = info.raw[0]
        who = self._threads.get(thread)
        if who is None:
            who = self._threads[thread] = self._who(thread)
        if kind == _ENTRY:
            number, first = struct.unpack_from("<QQ", info, 24)
            if number == _MARK_CALL and first & 0xFFFF_0000 == _MARK:
                self._part = (first & 0xFFFF) or -1
                return self._part < 0
            self._inside[thread] = name = NAMES.get(number, str(number))
            if self._part >= 0:
                self.calls[f"{self._part}/{who[0]}/{who[1]}"][name] += 1
        elif kind == _EXIT:
            name = self._inside.pop(thread, "")
            if self._part >= 0 and (name in _INTO or name in _OUT_OF):
                result = struct.unpack_from("<q", info, 24)[0]
                if result > 0:
                    self.bytes[f"{self._part}/{who[0]}/{who[1]}"]["in" if name in _INTO else "out"] += result
        return False

    @staticmethod
    def _who(thread: int) -> tuple[int, str]:
        status = Path(f"/proc/{thread}/status").read_text(errors="replace")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return int(fields["Tgid"]), "io" if fields["Name"].startswith("ZMQbg") else "main"


def count_steps(program: list[str]) -> dict[str, int]:
    """Instructions of ``program`` in each of its parts, which begin with marks; a part that begins again adds to itself.

    A ``rep`` instruction counts once, however often it repeats: how the C library copies depends on the processor.
    """
    child = os.fork()
    if child == 0:
        _libc.ptrace(_TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.execv(program[0], program)
    os.waitpid(child, 0)
    _ptrace(_SETOPTIONS, child, _SYSGOOD)
    counts: dict[str, int] = defaultdict(int)
    info = ctypes.create_string_buffer(128)
    registers = (ctypes.c_ulonglong * _REGISTERS)()
    at = ctypes.addressof(registers)
    resume, part, before, pending = _SYSCALL, 0, 0, 0
    ptrace, waitpid = _libc.ptrace, os.waitpid
    while True:
        if ptrace(resume, child, None, pending) < 0:
            raise OSError(ctypes.get_errno(), "the program went away")
        _, status = waitpid(child, 0)
        pending = 0
        if not os.WIFSTOPPED(status):
            if status:
                raise RuntimeError(f"the program ended with status {status}")
            return dict(counts)
        number = os.WSTOPSIG(status)
        if number == signal.SIGTRAP and resume == _SINGLESTEP:
            ptrace(_GETREGS, child, None, at)
            if registers[16] != before:
                before = registers[16]
                counts[str(part)] += 1
            # Single steps do not stop in system calls, so a mark is known by the registers before its instruction.
            if registers[10] == _MARK_CALL and registers[14] & 0xFFFF_0000 == _MARK:
                resume = _SYSCALL
        elif number == _SYSCALL_STOP:
            _ptrace(_SYSCALL_INFO, child, ctypes.addressof(info), len(info))
            call, first = struct.unpack_from("<QQ", info, 24)
            if info.raw[0] == _ENTRY and call == _MARK_CALL and first & 0xFFFF_0000 == _MARK:
                part = first & 0xFFFF
            resume = _SINGLESTEP if part and info.raw[0] == _EXIT else _SYSCALL
        elif number != signal.SIGTRAP:
            pending = number


def main(arguments: list[str]) -> None:
    """See the module."""
    if arguments[0] == "calls":
        counter = CallCounter()
        counter.run([int(one) for one in arguments[2:]])
        found: object = {"calls": counter.calls, "bytes": counter.bytes}
    else:
        found = count_steps(arguments[2:])
    Path(arguments[1]).write_text(json.dumps(found), encoding="ascii")


if __name__ == "__main__":
    main(sys.argv[1:])
