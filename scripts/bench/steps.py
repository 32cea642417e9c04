"""Measurements that are more than one run of a driver: idle, processor time, restart, connections, reads of a cold store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from bench import page_cache, remoting
from bench.measurement import run_driver
from bench.system import BenchError, Server
from bench.workloads import CPU_MESSAGES, FLOOR_COUNT, IDLE_S, RESTART_BYTES, SETTLE_S, Size, Workload

# The later work of a server for stored messages (indexes, flushes) counts too.
_SETTLE_S: Final = 0.5
_FILL_LIMIT_S: Final = 600.0


@dataclass(frozen=True)
class Step:
    """A measurement in a session: ``job`` is complete except for the fields that the step itself sets."""

    server: Server
    workload: Workload
    job: dict[str, Any]
    size: Size


def drive(step: Step) -> dict[str, Any]:
    """One run of the driver; a cold one after the server was stopped and its files were dropped from the page cache."""
    more = {}
    if step.workload.cold:
        step.server.stop()
        more["resident_share"] = page_cache.drop(step.server.store_files())
        step.server.restart()
    return run_driver(step.server, step.job, limit_s=step.workload.limit_s) | more


def idle(step: Step) -> dict[str, Any]:
    """Processor time and memory while nothing happens, a moment after the start."""
    time.sleep(SETTLE_S[step.size])
    before, began = step.server.cpu_seconds(), time.monotonic()
    time.sleep(IDLE_S[step.size])
    spent, seconds = step.server.cpu_seconds() - before, time.monotonic() - began
    return {
        "cpu_percent": 100 * spent / seconds,
        "memory_bytes": step.server.memory_bytes(),
        "processes": len(step.server.pids()),
        "seconds": seconds,
    }


def cpu(step: Step) -> dict[str, Any]:
    """CPU seconds per million messages of client and server, to produce them in batches and to read all of them.

    The cost of a client's start is left out: the same is done with a tenth of the messages, and the difference counts.
    """
    messages = CPU_MESSAGES[step.size]
    few = messages // 10
    spent: dict[tuple[str, int], float] = {}
    details = {}
    for work in ("batch", "read"):
        for count in (few, messages):
            result = run_driver(
                step.server,
                {**step.job, "work": work, "topic": f"cpu-{count}", "messages": count, "batch": 1000, "mode": ""},
                limit_s=step.workload.limit_s,
                settle_s=_SETTLE_S,
            )
            spent[work, count] = result["driver_cpu_s"] + result["server_cpu_s"]
            details[f"{work} {count}"] = {name: result[name] for name in ("driver_cpu_s", "server_cpu_s")}
    each = {work: (spent[work, messages] - spent[work, few]) / (messages - few) * 1e6 for work in ("batch", "read")}
    result = {"messages": messages, "details": details}
    if min(each.values()) <= 0:
        return result  # the cost of a start varies by more than the messages cost: no figure
    return {**result, "produce": each["batch"], "consume": each["read"], "cpu_s_per_million": sum(each.values())}


def floor(step: Step) -> dict[str, Any]:
    """CommitMQ's driver times an echo, its sends and fdatasync in turn."""
    job = {**step.job, "count": FLOOR_COUNT[step.size]}
    return run_driver(step.server, job, limit_s=step.workload.limit_s)


def restart(step: Step) -> dict[str, Any]:
    """Fill the store, kill the server, start it: seconds until a client's message went through and came back.

    The client tries from before the server starts; the page cache stays, as after any death of processes.
    """
    wanted = RESTART_BYTES[step.size]
    fill = {**step.job, "work": "batch", "messages": wanted // int(step.job["body_bytes"]), "batch": 1000}
    # The driver's own limit for any wait is for one message, not for all of them.
    filled = run_driver(step.server, {**fill, "timeout_s": _FILL_LIMIT_S}, limit_s=_FILL_LIMIT_S)
    times = _restarted(step, {**step.job, "work": "ready", "topic": "restarted"})
    return {**times, "stored_bytes": filled["messages"] * int(step.job["body_bytes"])}


def timers(step: Step) -> dict[str, Any]:
    """Memory before and after so many messages wait in the timer, and a start with them after ``kill -9``.

    The memory is that of all processes of the server: a process that it starts for this counts whole.
    """
    time.sleep(SETTLE_S[step.size])
    before = step.server.memory_bytes()
    filled = run_driver(step.server, step.job, limit_s=step.workload.limit_s)
    time.sleep(SETTLE_S[step.size])
    memory = step.server.memory_bytes()
    times = _restarted(step, {**step.job, "work": "timers_ready", "topic": "restarted"})
    return {
        "messages": filled["messages"],
        "fill_seconds": filled["seconds"],
        "memory_bytes": memory,
        "cost_bytes": memory - before,
        "errors": filled["errors"],
        **times,
    }


def connections(step: Step) -> dict[str, Any]:
    """Memory before and after so many clients connect, which then do nothing, and the processor time with them."""
    time.sleep(SETTLE_S[step.size])
    before = step.server.memory_bytes()
    count = int(step.job["connections"])
    with remoting.connected(step.server.broker_port, count):
        found = idle(step)
    return {**found, "connections": count, "cost_bytes": found["memory_bytes"] - before}


def _restarted(step: Step, job: dict[str, Any]) -> dict[str, Any]:
    """Kill the server and start it: ``seconds`` until the client of ``job``, which tries from before on, succeeded."""
    step.server.kill()
    found: list[dict[str, Any] | BenchError] = []
    job = {**job, "timeout_s": step.workload.limit_s}

    def wait_ready() -> None:
        try:
            found.append(run_driver(step.server, job, limit_s=step.workload.limit_s + 10, count_cpu=False))
        except BenchError as error:
            found.append(error)

    waiting = threading.Thread(target=wait_ready)
    waiting.start()
    # The client's own start must not count; it takes longest where it is a Java program.
    time.sleep(1.5)
    began = time.time()
    try:
        step.server.restart()
        serving_s = time.time() - began
    finally:
        waiting.join()
    if isinstance(found[0], BenchError):
        raise found[0]
    more = {name: found[0][name] for name in ("waiting",) if name in found[0]}
    return {"seconds": found[0]["wall_time"] - began, "serving_s": serving_s, **more}


STEPS: Final[dict[str, Callable[[Step], dict[str, Any]]]] = {
    "idle": idle,
    "cpu": cpu,
    "floor": floor,
    "restart": restart,
    "timers": timers,
    "connections": connections,
}
# The works of a driver that a step needs, when they have another name than the step.
NEEDS: Final[dict[str, frozenset[str]]] = {
    "idle": frozenset(),
    "cpu": frozenset({"batch", "read"}),
    "restart": frozenset({"batch", "ready"}),
    "timers": frozenset({"timers", "timers_ready"}),
}
