"""Whether the node lives, and whether it takes and gives messages: from the control block alone, so no process is asked."""

from __future__ import annotations

import os
import time
from typing import Final

from commitmq.control import DiskFlag, Word, WorkerState, WorkerWord
from commitmq.plugin import WorkerContext

_WRITER: Final = "writer"
_NEEDED: Final = ("coordinator", "dispatcher-consume_queue", "reput", "flush", "allocate", _WRITER, "cleanup")
_LATE_S: Final = 10.0


class Health:
    """See the module."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._control = context, context.control
        readers = [f"reader-{number}" for number in range(context.config.reader.count)]
        self._needed = [*_NEEDED, *readers, *(["dispatcher-memory"] if context.config.memory.enable else [])]

    def reasons(self) -> list[str]:
        """Why the node is not ready: a sentence each; none when it is."""
        control = self._control
        found = [why for role in self._needed if (why := self._why_down(role))]
        if number := control.get(Word.FLUSH_ERRNO):
            found.append(f"the device refused a sync: {os.strerror(number)}; the store is read-only")
        flags = control.get(Word.DISK_FLAGS)
        found += [f"sends are refused: {flag.name}" for flag in DiskFlag if flags & flag]
        return found

    def may_write(self) -> bool:
        """Whether sends are taken: the writer turns, the node is not drained, and device and disk are well."""
        control = self._control
        bad = control.get(Word.FLUSH_ERRNO) or control.get(Word.DISK_FLAGS) or self._why_down(_WRITER)
        return not (bad or self.notes())

    def notes(self) -> list[str]:
        """What is meant so, and no reason to be not ready: a sentence each."""
        if self._context.config.flow.refuse_sends:
            return ["sends are refused: the node is drained (flow.refuse_sends), until `commitmq drain off`"]
        return []

    def answer(self) -> dict[str, object]:
        """The answer of ``/health/ready``."""
        reasons = self.reasons()
        return {"ready": not reasons, "reasons": reasons, "takes_sends": self.may_write(), "notes": self.notes()}

    def _why_down(self, role: str) -> str:
        """Why the process ``role`` does not work: a sentence; empty when it does."""
        control, slot = self._control, self._context.slot_of(role)
        state, pid = control.worker(slot, WorkerWord.STATE), control.worker(slot, WorkerWord.PID)
        if state != WorkerState.READY or not _lives(pid):
            return f"the process {role} is not ready"
        age_s = (time.monotonic_ns() // 1_000_000 - control.worker(slot, WorkerWord.HEARTBEAT_MS)) / 1000
        return f"the loop of {role} has not turned for {age_s:.0f} s" if age_s > _LATE_S else ""


def _lives(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
