"""CommitMQ's driver, committing transactions: each client sends a half message, commits it, and so on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from bench.drivers.commitmq_topic import Target, words
from bench.drivers.common import DISTINCT_BODIES, Job, Result, make_bodies, percentiles
from commitmq import AsyncProducer, Producer
from commitmq.errors import CommitMQError

_GROUP = "bench-transactions"
_LOOK_S = 0.002


class _Count:
    """What the clients did: their samples (ns), and what failed."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.problems: list[str] = []


def transactions(job: Job) -> Result:
    """The clock runs until a consumer could read every committed message. ``tasks``: the clients are tasks of one thread."""
    run = _by_tasks if "tasks" in words(job) else _by_threads
    with Target(job) as target:
        count = _Count()
        began = before = 0

        def measured() -> None:
            nonlocal began, before
            before = target.wait_visible_all()
            began = time.perf_counter_ns()

        run(job, count, measured)
        ended = _wait_visible(target, before + len(count.samples))
    seconds = (ended - began) / 1e9
    return {
        "messages": len(count.samples),
        "seconds": seconds,
        "rate": len(count.samples) / seconds,
        "latency_us": percentiles(count.samples),
        "errors": len(count.problems),
        "problems": count.problems[:3],
    }


def _wait_visible(target: Target, wanted: int) -> int:
    deadline = time.monotonic() + target.job.timeout_s
    while target.visible() < wanted:
        if time.monotonic() > deadline:
            raise CommitMQError(f"{wanted} messages were committed, consumers see {target.visible()}")
        time.sleep(_LOOK_S)
    return time.perf_counter_ns()


def _by_tasks(job: Job, count: _Count, measured: Callable[[], None]) -> None:
    async def all_of_them() -> None:
        bodies = make_bodies(job)
        now = time.perf_counter_ns
        async with AsyncProducer(job.address, ack=job.ack, timeout_s=job.timeout_s, group=_GROUP) as producer:

            async def client(number: int, end: int) -> None:
                turn = number
                while (began := now()) < end:
                    turn += 1
                    try:
                        async with producer.transaction(job.topic, bodies[turn % DISTINCT_BODIES]):
                            pass
                    except CommitMQError as error:
                        count.problems.append(repr(error))
                        continue
                    count.samples.append(now() - began)

            for seconds in (job.warmup_s, job.seconds):
                count.samples.clear()
                measured()
                end = now() + int(seconds * 1e9)
                await asyncio.gather(*(client(number, end) for number in range(job.clients)))

    asyncio.run(all_of_them())


def _by_threads(job: Job, count: _Count, measured: Callable[[], None]) -> None:
    bodies = make_bodies(job)
    now = time.perf_counter_ns
    with Producer(job.address, ack=job.ack, timeout_s=job.timeout_s, group=_GROUP) as producer:

        def client(number: int, end: int) -> None:
            turn = number
            while (began := now()) < end:
                turn += 1
                try:
                    with producer.transaction(job.topic, bodies[turn % DISTINCT_BODIES]):
                        pass
                except CommitMQError as error:
                    count.problems.append(repr(error))
                    continue
                count.samples.append(now() - began)

        for seconds in (job.warmup_s, job.seconds):
            count.samples.clear()
            measured()
            end = now() + int(seconds * 1e9)
            threads = [threading.Thread(target=client, args=(number, end)) for number in range(job.clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
