"""The common part of all drivers in Python: job, bodies, percentiles, several clients at once, and the printing of
results.
"""

from __future__ import annotations

import json
import random
import string
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

DISTINCT_BODIES = 64
_PRINTABLE = (string.ascii_letters + string.digits + "+/").encode()

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """The job of the driver; README.md has the meaning of each field. Sizes in bytes, times in seconds."""

    address: str
    work: str
    topic: str
    queues: int = 4
    body_bytes: int = 1024
    ack: str = "memory"
    clients: int = 1
    seed: int = 1
    warmup_s: float = 0.5
    seconds: float = 2.0
    messages: int = 0
    window: int = 1000
    batch: int = 1000
    rate: float = 1000.0
    count: int = 1000
    mode: str = ""
    ahead_s: float = 10.0
    delay_ms: int = 1000
    timeout_s: float = 60.0


def run(works: dict[str, Callable[[Job], Result]]) -> None:
    """Do the job in the last argument with the function that ``works`` has for its work, and print its result."""
    given = json.loads(sys.argv[-1])
    known = {one.name for one in fields(Job)}
    job = Job(**{name: value for name, value in given.items() if name in known})
    result = works[job.work](job)
    print(json.dumps(result), flush=True)


def make_bodies(job: Job) -> list[bytes]:
    """Different bodies of printable pseudo-random bytes; the same seed gives the same ones."""
    noise = random.Random(job.seed)
    return [noise.randbytes(job.body_bytes).translate(_TO_PRINTABLE) for _ in range(DISTINCT_BODIES)]


_TO_PRINTABLE = bytes(_PRINTABLE[byte % len(_PRINTABLE)] for byte in range(256))


def percentiles(samples_ns: Sequence[int]) -> dict[str, float]:
    """Nearest-rank percentiles in microseconds of durations in nanoseconds; empty without samples."""
    if not samples_ns:
        return {}
    ordered = sorted(samples_ns)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "p99.99": 0.9999}
    found = {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] / 1000 for name, share in shares.items()}
    return {**found, "max": ordered[-1] / 1000}


def closed_loop(job: Job, make_send: Callable[[int], Callable[[bytes], object]]) -> Result:
    """The work ``send``: ``clients`` threads send one message at a time for ``seconds`` after ``warmup_s``.

    ``make_send`` makes one client and returns a function that sends a body and waits for its ack; it is called in the
    client's thread. An exception of a send counts as an error.
    """
    bodies = make_bodies(job)
    lock = threading.Lock()
    ready = threading.Barrier(job.clients + 1)
    samples: list[int] = []
    problems: list[str] = []

    def client(number: int) -> None:
        own: list[int] = []
        failed: list[str] = []
        try:
            send = make_send(number)
        except BaseException:
            ready.abort()
            raise
        ready.wait()
        now = time.perf_counter_ns
        counts_from = now() + int(job.warmup_s * 1e9)
        end = counts_from + int(job.seconds * 1e9)
        turn = number
        while (began := now()) < end:
            turn += 1
            try:
                send(bodies[turn % DISTINCT_BODIES])
            except Exception as error:
                failed.append(repr(error))
                continue
            ended = now()
            if began >= counts_from:
                own.append(ended - began)
        with lock:
            samples.extend(own)
            problems.extend(failed)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(job.clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    for thread in threads:
        thread.join()
    return {
        "messages": len(samples),
        "seconds": job.seconds,
        "rate": len(samples) / job.seconds,
        "latency_us": percentiles(samples),
        "errors": len(problems),
        "problems": problems[:3],
    }


def all_at_once(job: Job, make_part: Callable[[int, int], Callable[[], None]]) -> tuple[float, float]:
    """Times (``perf_counter``) at which ``clients`` threads together began and ended to send ``messages``.

    ``make_part(number, messages)`` makes one client, in its thread, and returns a function that sends its share and
    waits for the last ack.
    """
    ready = threading.Barrier(job.clients + 1)
    failed: list[BaseException] = []

    def client(number: int) -> None:
        share = job.messages // job.clients + (number < job.messages % job.clients)
        try:
            send_all = make_part(number, share)
            ready.wait()
            send_all()
        except BaseException as error:
            failed.append(error)
            ready.abort()

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(job.clients)]
    for thread in threads:
        thread.start()
    try:
        ready.wait()
    except threading.BrokenBarrierError:
        raise failed[0] from None
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    ended = time.perf_counter()
    if failed:
        raise failed[0]
    return began, ended


def until_ready(job: Job, attempt: Callable[[], None]) -> Result:
    """The work ``ready``: ``attempt`` sends one message and reads it back; tried every 20 ms until it works."""
    began = time.perf_counter()
    while True:
        try:
            attempt()
        except Exception:
            if time.perf_counter() - began > job.timeout_s:
                raise
            time.sleep(0.02)
        else:
            return {"seconds": time.perf_counter() - began, "wall_time": time.time()}
