"""What a client does while its own work and a node's are counted: every hot path, one part after the other.

    python workload.py ADDRESS TOPIC FOLDER ROLE=PID…

Writes ``counts.json`` to FOLDER: by part and role what was counted, and what was done meanwhile. The part "known" is none of
the node's work: as many writes and copies as this module says, so that a counter which misses some is found out. The parts run
in one process so that all of them meet the same connections, and each of them begins and ends when the node has nothing left
to do.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ptrace

BODY_BYTES = 1024
ROUNDS = 2
SINGLES = 100
PIPELINED = 2000
BATCHES = 5
READ = 8000
KNOWN = 1000
KNOWN_BYTES = 4096
QUIET_S = 0.15
IDLE_S = 1.0
CLIENT = "client"


@dataclass
class Work:
    """What one role did in one part. ``calls``: system calls by name, of its own threads and of ZeroMQ's."""

    main: dict[str, int] = field(default_factory=dict)
    io: dict[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    copied_bytes: int = 0
    python_calls: int = 0

    @property
    def system_calls(self) -> int:
        return sum(self.main.values()) + sum(self.io.values())


@dataclass
class Part:
    """``seconds`` it took under the tracer; ``stored_bytes``: of the log."""

    messages: int
    stored_bytes: int
    seconds: float
    roles: dict[str, Work] = field(default_factory=dict)


def load(folder: Path) -> dict[str, list[Part]]:
    """What was counted: each round of each part, by the part's name."""
    found: dict[str, list[Part]] = {}
    for name, one in json.loads((folder / "counts.json").read_bytes()):
        roles = {role: Work(**work) for role, work in one.pop("roles").items()}
        found.setdefault(name, []).append(Part(**one, roles=roles))
    return found


class Counting:
    """Runs parts. Counters of Python calls and copies are read from the files of the shims, if they are there."""

    def __init__(self, folder: Path, pids: dict[str, int], written: Callable[[], int]) -> None:
        self._folder = folder
        self._pids = {**pids, CLIENT: os.getpid()}
        self._written = written
        self._cells: dict[str, memoryview] = {}
        self._parts: list[tuple[str, Part]] = []
        self._tracer: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Trace from here on."""
        pids = [str(pid) for pid in self._pids.values()]
        own = {name: value for name, value in os.environ.items() if name not in ("COMMITMQ_COUNT", "LD_PRELOAD")}
        self._tracer = subprocess.Popen(
            [sys.executable, ptrace.__file__, "calls", str(self._folder / "traced"), *pids],
            stdout=subprocess.PIPE,
            env=own,
        )
        assert self._tracer.stdout is not None
        if self._tracer.stdout.readline() != b"ready\n":
            raise RuntimeError("the tracer did not start")

    def part(self, name: str, messages: int, work: Callable[[], object]) -> None:
        """Count what all of them do during ``work``, which is ``messages`` messages."""
        time.sleep(QUIET_S)
        before, stored = self._shims(), self._written()
        started = time.monotonic()
        number = len(self._parts) + 1
        ptrace.mark(2 * number)
        work()
        time.sleep(QUIET_S)  # flush, dispatch and index are behind the answers
        ptrace.mark(2 * number + 1)
        seconds = time.monotonic() - started
        part = Part(messages, self._written() - stored, seconds)
        for role, (copied, calls) in self._shims().items():
            part.roles[role] = Work(copied_bytes=copied - before[role][0], python_calls=calls - before[role][1])
        self._parts.append((name, part))

    def finish(self) -> None:
        """Write down everything."""
        assert self._tracer is not None
        ptrace.mark(ptrace.END)
        if self._tracer.wait(20) != 0:
            raise RuntimeError("the tracer failed")
        traced = json.loads((self._folder / "traced").read_bytes())
        for number, (_, part) in enumerate(self._parts, 1):
            for role, pid in self._pids.items():
                work = part.roles[role]
                work.main = traced["calls"].get(f"{2 * number}/{pid}/main", {})
                work.io = traced["calls"].get(f"{2 * number}/{pid}/io", {})
                for kind in ("main", "io"):
                    found = traced["bytes"].get(f"{2 * number}/{pid}/{kind}", {})
                    work.bytes_in += found.get("in", 0)
                    work.bytes_out += found.get("out", 0)
        report = [(name, asdict(part)) for name, part in self._parts]
        (self._folder / "counts.json").write_text(json.dumps(report), encoding="ascii")

    def _shims(self) -> dict[str, tuple[int, int]]:
        """Bytes copied and Python calls so far, by role; zeros where nothing counts them."""
        return {role: (self._cell(f"copies.{pid}"), self._cell(f"calls.{pid}")) for role, pid in self._pids.items()}

    def _cell(self, name: str) -> int:
        """The counter in the file ``name``. Mapped once: reading it must not be work that shows in the counts."""
        cell = self._cells.get(name)
        if cell is None:
            try:
                with open(self._folder / name, "rb") as file:
                    cell = memoryview(mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)).cast("Q")
            except FileNotFoundError:
                cell = memoryview(bytes(8)).cast("Q")
            self._cells[name] = cell
        return cell[0]


def run(address: str, topic: str, folder: Path, pids: dict[str, int]) -> None:
    """All parts; see the module."""
    from commitmq import Producer, Reader
    from commitmq.control import ControlBlock, Word
    from commitmq.store.layout import StoreLayout

    body = os.urandom(BODY_BYTES)
    with Producer(address) as producer, Producer(address) as pipelining:
        control = ControlBlock(StoreLayout(producer._lanes.writer.lane.directory.metadata(timeout_s=10).store).control)
        counting = Counting(folder, pids, lambda: control.get(Word.WRITTEN))

        def single(ack: str, count: int) -> None:
            for _ in range(count):
                producer.send(topic, body, queue=0, ack=ack)

        def batches(size: int, count: int) -> None:
            bodies = [body] * size
            for _ in range(count):
                producer.send_batch(topic, bodies, queue=0, ack="flushed")

        def pipelined(count: int) -> None:
            futures = [pipelining.send_async(topic, body, queue=0, ack="memory") for _ in range(count)]
            pipelining.flush(60)
            for future in futures:
                future.result(0)

        def known(nowhere: int, count: int) -> None:
            block = bytearray(body) * (KNOWN_BYTES // len(body))
            for _ in range(count):
                os.write(nowhere, bytes(block))

        def read(consumer: Any, count: int) -> None:
            got = 0
            while got < count:
                got += len(consumer.poll(5.0, 4000))

        # What happens once only (connecting, looking up routes, importing) happens before.
        for ack in ("memory", "flushed"):
            single(ack, 20)
        for size in (1000, 2000):
            batches(size, 2)
        pipelined(500)
        with (
            Reader(topic, node=address, mode="ranges") as mapped,
            Reader(topic, node=address, mode="bytes") as sent,
        ):
            for consumer in (mapped, sent):
                read(consumer, 1000)
            counting.start()
            counting.part("idle", 1, lambda: time.sleep(IDLE_S))
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for _ in range(ROUNDS):
                counting.part("known", KNOWN, lambda: known(nowhere, KNOWN))
                counting.part("single, memory", SINGLES, lambda: single("memory", SINGLES))
                counting.part("single, flushed", SINGLES, lambda: single("flushed", SINGLES))
                counting.part("pipelined", PIPELINED, lambda: pipelined(PIPELINED))
                counting.part("batches of 1000", BATCHES * 1000, lambda: batches(1000, BATCHES))
                counting.part("batches of 2000", BATCHES * 2000, lambda: batches(2000, BATCHES))
                counting.part("read, mapped", READ, lambda: read(mapped, READ))
                counting.part("read, sent", READ, lambda: read(sent, READ))
            os.close(nowhere)
        counting.finish()


if __name__ == "__main__":
    run(
        sys.argv[1],
        sys.argv[2],
        Path(sys.argv[3]),
        {role: int(pid) for role, _, pid in (one.partition("=") for one in sys.argv[4:])},
    )
