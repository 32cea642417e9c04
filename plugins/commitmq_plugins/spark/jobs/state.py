"""The state of a job that sends messages, as one JSON file: the job can be interrupted anywhere and run again.

    what     the request; another request with the same file is refused
    sink_id  the id of its producers: the same in every run, so that the node recognises stored messages
    plan     the decision at the beginning: the messages to send, cut into steps
    done     how many steps are finished

The file is replaced as a whole and synced before a step begins, so a run that dies repeats at most the step it was in;
the node stores no message of that step twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commitmq import failpoints
from commitmq.errors import CommitMQError
from commitmq.files import atomic_file
from commitmq_plugins.spark.jobs.manifest import make_folder


class StateError(CommitMQError):
    """A job's state belongs to another job, is in use or cannot be read."""


class JobState:
    """The state of one job; created by :func:`opened`."""

    def __init__(self, path: Path, what: dict[str, Any], sink_id: str, plan: dict[str, Any], done: int) -> None:
        self.path = path
        self.what = what
        self.sink_id = sink_id
        self.plan = plan
        self.done = done

    def save(self) -> None:
        """Make the present state durable."""
        members = {"what": self.what, "sink_id": self.sink_id, "plan": self.plan, "done": self.done}
        atomic_file.replace(self.path, json.dumps(members, separators=(",", ":")).encode(), "job_state", mode=0o666)

    def finish_step(self) -> None:
        """Count one more step as done."""
        if failpoints.ACTIVE:
            failpoints.hit("job.before_step_done")
        self.done += 1
        self.save()


@contextlib.contextmanager
def opened(path: Path, what: dict[str, Any], plan: Callable[[], dict[str, Any]]) -> Iterator[JobState]:
    """The state in ``path``; a new one with ``plan()`` if the file does not exist. No other process can have it
    meanwhile.

    Raises StateError when it belongs to another request than ``what``.
    """
    path = path.absolute()
    make_folder(path.parent)
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(f"another run of this job has {path}") from error
        if path.exists():
            try:
                members = json.loads(path.read_text(encoding="utf-8"))
                found = JobState(path, members["what"], members["sink_id"], members["plan"], members["done"])
            except (ValueError, KeyError, TypeError) as error:
                raise StateError(f"{path} is no state of a job: {error}") from error
            if found.what != what:
                raise StateError(f"{path} belongs to another job, {found.what}, not to {what}: use another file")
        else:
            found = JobState(path, what, f"job-{secrets.token_hex(10)}", plan(), 0)
            found.save()
        yield found
    finally:
        os.close(descriptor)
