"""Puts a unit's ``SystemCallFilter=`` and ``RestrictAddressFamilies=`` on a command, as systemd does, and runs it:

    python system_call_filter.py LIST COMMAND…

LIST is a file with a name of a system call or an address family (AF_…) on each line. All other calls fail with EPERM.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

_ALLOW = 0x7FFF0000
_FAIL_WITH_EPERM = 0x00050000 | 1
_EQUAL = 4


class _Comparison(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def system_calls(analyze: str, setting: str) -> list[str]:
    """The names that ``setting`` (``@system-service``, names, groups) allows, by ``systemd-analyze``'s own groups."""
    found: set[str] = set()
    waiting = setting.split()
    while waiting:
        name = waiting.pop()
        if not name.startswith("@"):
            found.add(name)
            continue
        done = subprocess.run([analyze, "syscall-filter", name], capture_output=True, text=True, check=True)
        waiting += [line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"\s+[@a-z0-9_-]+", line)]
    return sorted(found)


def families(names: list[str]) -> list[int]:
    """The numbers of ``AF_…`` names."""
    return [int(getattr(socket, name)) for name in names if name.startswith("AF_")]


def main(listing: str, *command: str) -> None:
    names = Path(listing).read_text().split()
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_FAIL_WITH_EPERM)))
    assert context.value
    for name in names:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0 or name.startswith("AF_"):
            continue  # of another processor, or newer than the library
        if name != "socket":
            assert library.seccomp_rule_add_array(context, ctypes.c_uint32(_ALLOW), number, 0, None) == 0, name
            continue
        for family in families(names):
            rule = (_Comparison * 1)(_Comparison(0, _EQUAL, family, 0))
            assert library.seccomp_rule_add_array(context, ctypes.c_uint32(_ALLOW), number, 1, rule) == 0
    assert library.seccomp_load(context) == 0, "also sets NoNewPrivileges"
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
