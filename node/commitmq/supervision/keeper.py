"""The small parent of a supervisor: starts it again after a kill, and passes signals and exit codes through.

``commitmq start`` becomes ``python -m commitmq.supervision.keeper STORE CONFIG_FD READY_FD MODE`` (in the foreground)
or leaves this process behind (in the background). It spends its life in ``wait`` and loads only the standard library.

``… MODE LIFE PID WORD_FD`` is the command of a supervisor in the background when its keeper was killed. That
supervisor, PID, is the new keeper's parent and not its child. WORD_FD is a pipe on which the supervisor writes its exit
code when it ends by itself, and which closes without a word when it was killed. Then the keeper starts the next
supervisor, which is its child, and from there on everything is as usual. LIFE names the node's life
(:func:`commitmq.supervision.node_files.node_life`), which begins with its first keeper.

* SIGTERM and SIGINT are passed to the supervisor as SIGTERM and remembered: a supervisor that dies after that is not
  started again, so a stop stays a stop even when it goes wrong.
* A supervisor killed by any other signal is started again, after 100 ms at first, twice that each time up to 10 s, and
  from 100 ms again after it ran for a minute. It recovers the store as after any crash.
* An exit code is passed through. After a kill, that of a full disk (79) is not: the keeper starts another supervisor in the
  same way until there is room.

CONFIG_FD is a memory file with the configuration, read by every supervisor: a restarted supervisor runs with exactly
the values that the node was started with. READY_FD (-1: none) is a pipe on which the supervisor reports its result to a
waiting ``start``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from types import FrameType

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
WELL_AFTER_S = 60.0
# Exit code CliExit.UNCLEAN_STOP: the node died while it stopped. Repeated here so that nothing is imported.
UNCLEAN_STOP = 75
# Exit code CliExit.NO_ROOM: the disk was full when the supervisor started.
NO_ROOM = 79

_STOPPING = {"asked": False}


def main(arguments: list[str]) -> int:
    """Keep one supervisor running; returns the exit code to end with."""
    store, config_fd, ready_fd, mode, *adopted = arguments
    life = adopted[0] if adopted else ""
    child = 0
    parent_fd = -1

    def pass_on(_signal: int, _frame: FrameType | None) -> None:
        _STOPPING["asked"] = True
        if child > 0:
            # The child cannot have been reaped and its pid reused: reaping happens below, with these signals blocked.
            os.kill(child, signal.SIGTERM)
        elif parent_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(parent_fd, signal.SIGTERM)

    handled = {signal.SIGTERM, signal.SIGINT}
    for number in handled:
        signal.signal(number, pass_on)
    # A closed terminal must not kill a process that writes a log; in the foreground it ends the node in order.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if mode == "background" else pass_on)
    handled.add(signal.SIGHUP)
    if adopted:
        parent_fd = _open_parent(int(adopted[1]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)  # a later keeper is started with its signals blocked
    _hit("keeper.begin")

    pause_s = FIRST_PAUSE_S
    was_killed = bool(adopted)  # a node that ran is started again also when the disk is full meanwhile
    if adopted:
        code = _wait_for_word(int(adopted[2]))
        if parent_fd >= 0:
            closing, parent_fd = parent_fd, -1
            os.close(closing)
        if code >= 0:
            return code
        if _STOPPING["asked"]:
            return UNCLEAN_STOP
        _say(store, int(config_fd), "supervisor was killed, starting it again")
    while True:
        started = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        if not _STOPPING["asked"]:
            child = _start(store, config_fd, ready_fd, mode, life)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        _hit("keeper.after_start")
        if _STOPPING["asked"] and child == 0:
            return UNCLEAN_STOP
        status = _wait_and_reap(child, handled)
        child = 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
        if code >= 0 and not (code == NO_ROOM and was_killed and not _STOPPING["asked"]):
            return code
        killer = os.WTERMSIG(status) if code < 0 else 0
        if _STOPPING["asked"] or killer in (signal.SIGTERM, signal.SIGINT):
            return UNCLEAN_STOP
        was_killed = True
        if time.monotonic() - started >= WELL_AFTER_S:
            pause_s = FIRST_PAUSE_S
        why = f"supervisor was killed by signal {killer}" if killer else "the disk has no room for a start"
        _say(store, int(config_fd), f"{why}, starting it again in {pause_s:.1f} s")
        # the loop above sees a stop that comes during this sleep: the handler has run, and no child is started
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


def _open_parent(pid: int) -> int:
    """A pidfd of the parent ``pid``; -1 when the parent is gone, so that its number may name another process."""
    try:
        found = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if os.getppid() == pid:
        return found
    os.close(found)
    return -1


def _wait_for_word(fd: int) -> int:
    """The exit code that the supervisor writes to ``fd``; -1 when it ended without one."""
    try:
        word = os.read(fd, 1)
    finally:
        os.close(fd)
    return word[0] if word else -1


def _hit(name: str) -> None:
    if "COMMITMQ_FAILPOINTS" in os.environ:  # else only the standard library is loaded
        from commitmq import failpoints

        failpoints.hit(name)


def _start(store: str, config_fd: str, ready_fd: str, mode: str, life: str) -> int:
    """Fork and exec a supervisor; returns its pid. Called with the handled signals blocked."""
    arguments = [
        sys.executable,
        "-m",
        "commitmq.supervision.supervisor_process",
        store,
        config_fd,
        ready_fd,
        mode,
        str(os.getpid()),
        life,
    ]
    return os.posix_spawn(
        sys.executable,
        arguments,
        os.environ,
        # Its own process group: Ctrl-C reaches only the keeper, which passes it on once.
        setpgroup=0,
        setsigmask=[],
        setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
    )


def _wait_and_reap(child: int, handled: set[signal.Signals]) -> int:
    """Wait for ``child``, and reap all other children that end (as pid 1 of a container, this process gets orphans).

    Returns the wait status with the ``handled`` signals blocked: the caller forgets the pid before it unblocks them.
    """
    while True:
        # Look first without reaping, so that the handler never signals a pid that is already free for reuse.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        if ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        return os.waitpid(child, 0)[1]


def _say(store: str, config_fd: int, message: str) -> None:
    """Write one line as :mod:`commitmq.log` does, to the file that is called node.log now if this process has an older one."""
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"
    line = f"{stamp} warning keeper {message}\n"
    with contextlib.suppress(OSError, ValueError, LookupError):
        config = json.loads(os.pread(config_fd, os.fstat(config_fd).st_size, 0))["config"]
        if config["log"]["format"] == "json":
            line = json.dumps({"time": stamp, "level": "warning", "process": "keeper", "message": message}) + "\n"
    path = os.path.join(os.path.realpath(store), "commitmq", "node.log")
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self/fd/2").startswith(path):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.dup2(fd, 2)  # supervisors inherit it
            os.close(fd)
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
