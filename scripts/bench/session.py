"""One server of one system, from its start to its end, and all workloads of one promise with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import machine, processes
from bench.figures import figures_of
from bench.results import Results
from bench.steps import NEEDS, STEPS, Step, drive
from bench.system import BenchError, Durability, Server, System
from bench.workloads import BEFORE, COMMON, OURS, Size, Workload

Tell = Callable[[str], None]


def takes(system: System, workload: Workload, durability: Durability) -> bool:
    """True when ``workload`` is measured with ``system`` and acks of this ``durability``."""
    needed = NEEDS.get(workload.work, frozenset({workload.work}))
    if not needed <= system.works or system.name in workload.without:
        return False
    is_ours = system.name in (OURS, BEFORE)
    return durability in workload.durabilities and (is_ours or durability not in workload.only_ours)


class Session:
    """Measures ``workloads`` one after the other; a failure is noted, and the next one follows."""

    def __init__(
        self,
        results: Results,
        system: System,
        durability: Durability,
        workloads: Sequence[Workload],
        *,
        size: Size,
        round_number: int,
        part: str,
        folder: Path,
        tell: Tell,
    ) -> None:
        """``folder`` is made for the server, and removed afterwards."""
        self._results = results
        self._system = system
        self._durability: Durability = durability
        self._workloads = [one for one in workloads if takes(system, one, durability)]
        self._size: Size = size
        self._folder = folder
        self._tell = tell
        self._filled: dict[str, dict[str, Any]] = {}
        self.key = {"round": round_number, "part": part, "durability": durability, "system": system.name}

    def run(self) -> None:
        """Measure everything, unless an earlier run did."""
        if not self._workloads or self._results.is_done(self.key):
            return
        self._results.begin(self.key)
        load_before = machine.load_average()
        self._tell(f"round {self.key['round']}, {self._system.name}, ack {self._durability}")
        others = processes.children()
        try:
            self._measure_all()
        except KeyboardInterrupt:
            processes.end_children(without=others)
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._results.finish({**self.key, "load_before": load_before, "load_after": machine.load_average()})

    def _measure_all(self) -> None:
        try:
            server = self._start()
        except (BenchError, OSError) as error:
            for workload in self._workloads:
                for variant, job in workload.jobs(self._system.name, self._size, self._durability).items():
                    self._note(workload, variant, job, error=f"the server did not start: {error}")
            return
        with server:
            for workload in self._workloads:
                self._measure(server, workload)

    def _start(self) -> Server:
        """A server with a new folder. Once more when that fails: a port may have been taken by then. Raises BenchError."""
        try:
            return self._system.start(self._folder, self._durability)
        except BenchError as error:
            self._tell(f"  it did not start, and is started once more: {error}")
            shutil.rmtree(self._folder, ignore_errors=True)
            return self._system.start(self._folder, self._durability)

    def _measure(self, server: Server, workload: Workload) -> None:
        for variant, wanted in workload.jobs(self._system.name, self._size, self._durability).items():
            job = self._job(workload, wanted)
            try:
                self._keep_alive(server)
                step = Step(server, workload, self._readable(workload, job), self._size)
                result = STEPS.get(workload.work, drive)(step)
            except Exception as error:
                # After every error the run continues; the table names the gap and this text.
                self._note(workload, variant, job, error=str(error) or repr(error))
                continue
            self._filled.setdefault(workload.name, {**step.job, **result})
            self._note(workload, variant, step.job, result=result)

    def _job(self, workload: Workload, wanted: dict[str, Any]) -> dict[str, Any]:
        common = {"work": workload.work, "topic": workload.name, "queues": 4, "ack": self._durability}
        return {**COMMON[self._size], **common, "clients": 1, "seed": self.key["round"], "timeout_s": 60.0, **wanted}

    def _readable(self, workload: Workload, job: dict[str, Any]) -> dict[str, Any]:
        """The job, with the messages that another workload of this session stored. Raises BenchError without them."""
        if not workload.reads:
            return job
        if workload.reads not in self._filled:
            raise BenchError(f"{workload.reads} stored nothing to read")
        filled = self._filled[workload.reads]
        return {**job, **{name: filled[name] for name in ("topic", "queues", "messages")}}

    def _keep_alive(self, server: Server) -> None:
        """Start a server again that died in the last workload."""
        if not server.pids():
            server.kill()
            server.restart()

    def _note(self, workload: Workload, variant: str, job: dict[str, Any], **what: Any) -> None:
        self._results.add(self.key, workload.name, variant, work=workload.work, job=job, **what)
        name = f"{workload.name} {variant}".strip()
        if "error" in what:
            shown = "FAILED: " + what["error"].splitlines()[0]
        else:
            figures = figures_of(workload.work, what["result"])
            shown = ", ".join(f"{figure} {value:,.4g}" for figure, value in figures.items())
        self._tell(f"  {name}: {shown}")
