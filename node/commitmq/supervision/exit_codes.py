"""The exit codes of ``commitmq``: named, documented in its help, and never reused for another meaning.

When a worker's exit code (:class:`commitmq.workers.runtime.context.ExitCode`) ends the whole node, the number is the
same.

The reason why a node cannot start, as a sentence for the person at the terminal.

The words for the progress of a worker that starts.
"""

from __future__ import annotations

from enum import IntEnum

from commitmq.errors import CommitMQError
from commitmq.files.disk_space import tells_of_no_space
from commitmq.store.layout import StoreLayout


class CliExit(IntEnum):
    """Exit codes of every verb; ``start`` and ``stop`` use most of them."""

    OK = 0
    FAILURE = 1  # the node or the verb refused; the sentence on standard error says why
    USAGE = 2  # click's own: an unknown option, a missing argument
    DAMAGE_FOUND = 65  # `store verify`, `repair`, `rebuild` finished, and the store is not right everywhere
    NODE_UNAVAILABLE = 69  # no node answers at the address, or none runs on the store
    CRASHED = 70  # an unexpected error; a bug worth reporting
    START_FAILED = 71  # a process of the node could not start
    ADDRESS_IN_USE = 72  # another program listens on a port of the node
    STORE_LOCKED = 73  # another process holds the store; the message names its pid
    STORE_UNUSABLE = 74  # nothing was done: the store may not be entered, has other sizes, or is damaged
    UNCLEAN_STOP = 75  # the node is gone but did not end in order; the next start runs a recovery
    CONFIG_ERROR = 78  # an unknown key, a wrong type or a value out of range
    NO_ROOM = 79  # the disk has no space left for the files of a start; a keeper tries again, an operator frees some
    INSECURE_LISTENER = 80  # a listener would be open to a network without authentication and encryption
    INTERRUPTED = 130  # Ctrl-C; for `produce` also SIGTERM


MEANINGS = {
    CliExit.OK: "success",
    CliExit.FAILURE: "the request was refused; the message says why",
    CliExit.USAGE: "wrong options or arguments",
    CliExit.DAMAGE_FOUND: "the store was checked or repaired, and has damage",
    CliExit.NODE_UNAVAILABLE: "no node answers",
    CliExit.CRASHED: "unexpected error",
    CliExit.START_FAILED: "a process of the node could not start",
    CliExit.ADDRESS_IN_USE: "another program listens on a port of the node",
    CliExit.STORE_LOCKED: "another process holds the store",
    CliExit.STORE_UNUSABLE: "the store cannot be used: no access, other sizes, or damage that keeps it from being opened",
    CliExit.UNCLEAN_STOP: "the node is gone but did not stop in order; the next start recovers",
    CliExit.NO_ROOM: "the disk has no space left for the files of a start",
    CliExit.CONFIG_ERROR: "a configuration key or value is wrong",
    CliExit.INSECURE_LISTENER: "a listener would be open to a network without authentication and encryption",
    CliExit.INTERRUPTED: "interrupted with Ctrl-C (or `produce` with SIGTERM)",
}


# A role that dies this often before it is ready, while the node starts, will not come up at the next try either.
START_ATTEMPTS = 3


class StartFailed(CommitMQError):
    """The node cannot start. The sentence and the exit code are for the person at the terminal."""

    def __init__(self, message: str, code: CliExit) -> None:
        super().__init__(message)
        self.code = code


def with_a_way_out(sentence: str, layout: StoreLayout) -> str:
    """``sentence``; when it reports a full disk, also how to free space without a node."""
    if "store expire" in sentence or not tells_of_no_space(sentence):
        return sentence
    return (
        f"{sentence}. The disk of the store has no space left for the files of a start. Nothing is lost. To free some: "
        f"`commitmq store expire {layout.root} --keep-bytes N` deletes the oldest segments without a node (--dry-run says "
        "which)"
    )


def progress_sentence(progress: object) -> str:
    """``checking the log, 45 % of 256.0 MiB``, of a worker's report about its start; "" for another one."""
    if not isinstance(progress, dict) or not isinstance(progress.get("phase"), str):
        return ""
    phase, done, total = progress["phase"], progress.get("done"), progress.get("total")
    if not isinstance(done, int) or not isinstance(total, int) or total <= 0:
        return str(phase)
    share = f"{min(done, total) * 100 // total} % of "
    if progress.get("unit") == "bytes":
        return f"{phase}, {share}{total / (1 << 20):.1f} MiB"
    return f"{phase}, {share}{total}"
