"""Runs a command as an engine would in a container, without one: ``unshare`` has made the namespaces, this makes the rest.

    unshare --mount --pid --fork --net --ipc --uts python in_container.py ROOT VOLUME COMMAND…

ROOT becomes the root, read-only, with a /proc, /dev, /tmp and /dev/shm of its own; VOLUME is /var/lib/commitmq in it. The
command is process 1, has the account 10001 and a loopback device, and nothing of the caller's environment. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

ACCOUNT = 10001
ENVIRONMENT = {
    "PATH": "/opt/commitmq/bin:/usr/bin:/bin",
    "COMMITMQ__METRICS__ENABLE": "true",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_SET_FLAGS, _UP = 0x8914, 0x1


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main(root: str, volume: str, *command: str) -> None:
    mount("--make-rprivate", "/")
    mount("--bind", root, root)
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", f"{root}/dev")
    for name in ("null", "zero", "urandom", "random"):
        Path(f"{root}/dev/{name}").touch()
        mount("--bind", f"/dev/{name}", f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm")
    for name in ("/dev/shm", "/tmp"):
        mount("-t", "tmpfs", "-o", "mode=1777,nosuid,nodev", "tmpfs", f"{root}{name}")
    mount("--bind", volume, f"{root}/var/lib/commitmq")
    mount("-o", "remount,bind,ro", root)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    os.chroot(root)
    os.chdir("/var/lib/commitmq")
    os.setgroups([])
    os.setresgid(ACCOUNT, ACCOUNT, ACCOUNT)
    os.setresuid(ACCOUNT, ACCOUNT, ACCOUNT)
    os.execve(f"/opt/commitmq/bin/{command[0]}", list(command), ENVIRONMENT)


if __name__ == "__main__":
    main(*sys.argv[1:])
