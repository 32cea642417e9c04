"""CommitMQ's own client: the public Producer, Consumer and Admin, as a program would use them.

``mode`` is a list of words: ``tcp`` connects like a client on another host; ``threads`` and ``tasks`` say how the
clients of ``send`` wait; ``columns`` and ``messages`` in which form ``read`` wants messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from multiprocessing.synchronize import Barrier

from bench.drivers import commitmq_delays as delays
from bench.drivers import commitmq_following as following
from bench.drivers import commitmq_handling as handling
from bench.drivers import commitmq_reading as reading
from bench.drivers import commitmq_transactions as transactions
from bench.drivers.commitmq_topic import Target, connect_as_from_elsewhere, words
from bench.drivers.common import DISTINCT_BODIES, Job, Result, closed_loop, make_bodies, percentiles, run
from commitmq import AsyncProducer, BatchResult, Producer, SendResult

_WARM_MESSAGES = 1000


def send(job: Job) -> Result:
    """Threads share one producer, which joins their simultaneous sends; ``tasks`` are asyncio's in one thread."""
    with Target(job) as target:
        if "tasks" in words(job):
            return asyncio.run(_send_by_tasks(job))
        with Producer(target.address, ack=job.ack, timeout_s=job.timeout_s) as producer:

            def make_send(_number: int) -> Callable[[bytes], object]:
                producer.send(job.topic, b"connects")
                return lambda body: producer.send(job.topic, body)

            return closed_loop(job, make_send)


async def _send_by_tasks(job: Job) -> Result:
    bodies = make_bodies(job)
    samples: list[int] = []
    problems: list[str] = []
    now = time.perf_counter_ns
    async with AsyncProducer(job.address, ack=job.ack, timeout_s=job.timeout_s) as producer:
        await producer.send(job.topic, b"connects")
        counts_from = now() + int(job.warmup_s * 1e9)
        end = counts_from + int(job.seconds * 1e9)

        async def client(number: int) -> None:
            turn = number
            while (began := now()) < end:
                turn += 1
                try:
                    await producer.send(job.topic, bodies[turn % DISTINCT_BODIES])
                except Exception as error:
                    problems.append(repr(error))
                    continue
                if began >= counts_from:
                    samples.append(now() - began)

        await asyncio.gather(*(client(number) for number in range(job.clients)))
    return {
        "messages": len(samples),
        "seconds": job.seconds,
        "rate": len(samples) / job.seconds,
        "latency_us": percentiles(samples),
        "errors": len(problems),
        "problems": problems[:3],
    }


def pipeline(job: Job) -> Result:
    """``send_async`` with at most ``window`` pending; every future is looked at."""
    bodies = make_bodies(job)
    errors = 0
    with (
        Target(job) as target,
        Producer(target.address, ack=job.ack, timeout_s=job.timeout_s, max_pending=job.window) as producer,
    ):
        supply = itertools.cycle(bodies)
        pending: deque[Future[SendResult]] = deque()

        def send_all(messages: int) -> None:
            nonlocal errors
            for body in itertools.islice(supply, messages):
                pending.append(producer.send_async(job.topic, body))
                # The oldest are done by now, and their results are not needed any more.
                while len(pending) > 2 * job.window:
                    errors += pending.popleft().exception() is not None
            producer.flush(job.timeout_s)
            while pending:
                errors += pending.popleft().exception() is not None

        with target.timed() as times:
            send_all(min(_WARM_MESSAGES, job.messages))
            before = target.wait_visible_all()
            times.begin()
            send_all(job.messages)
            times.acked()
            target.wait_visible(before + job.messages - errors)
            times.visible()
        return {"messages": job.messages, **times.result(), "errors": errors}


def batch(job: Job) -> Result:
    """``send_batch_async``; each client is a process of its own, as Python programs that want more than one core are."""
    with Target(job) as target, target.timed() as times:
        method = multiprocessing.get_context("spawn")
        barrier = method.Barrier(job.clients + 1)
        clients = [
            method.Process(target=_batches, args=(job, number, barrier), daemon=True)
            for number in range(job.clients if job.clients > 1 else 0)
        ]
        if clients:
            for client in clients:
                client.start()
            barrier.wait(job.timeout_s)  # all are connected and warm
            before = target.wait_visible_all()
            times.begin()
            barrier.wait(job.timeout_s)
            barrier.wait()  # all is acknowledged: the end of the processes is not part of their work
        else:
            with _batch_sender(job, 0) as send_all:
                before = target.wait_visible_all()
                times.begin()
                send_all()
        times.acked()
        target.wait_visible(before + job.messages)
        times.visible()
        target.wait_indexed()
        times.indexed()
        for client in clients:
            client.join(job.timeout_s)
        return {"messages": job.messages, **times.result(), "errors": 0}


@contextlib.contextmanager
def _batch_sender(job: Job, number: int) -> Iterator[Callable[[], None]]:
    """A function that sends one client's share. The client is connected, and the modules for a batch are imported."""
    share = job.messages // job.clients + (number < job.messages % job.clients)
    bodies = [body for body, _ in zip(itertools.cycle(make_bodies(job)), range(job.batch), strict=False)]
    names = Target.names(job)
    with Producer(job.address, ack=job.ack, timeout_s=job.timeout_s) as producer:
        for name in names[:1] if number == 0 else ():
            producer.send_batch(name, bodies[: min(_WARM_MESSAGES, job.batch)])
        turns = itertools.cycle(names)

        def send_all() -> None:
            sent = 0
            pending: deque[Future[BatchResult]] = deque()
            while sent < share:
                part = bodies if share - sent >= len(bodies) else bodies[: share - sent]
                pending.append(producer.send_batch_async(next(turns), part))  # waits while enough is pending
                sent += len(part)
                while pending and pending[0].done():
                    pending.popleft().result()
            for one in pending:
                one.result()

        yield send_all


def _batches(job: Job, number: int, barrier: Barrier) -> None:
    with _batch_sender(job, number) as send_all:
        barrier.wait(job.timeout_s)
        barrier.wait(job.timeout_s)
        try:
            send_all()
        except BaseException:
            barrier.abort()  # or the others would wait for ever
            raise
        barrier.wait()


def floor(job: Job) -> Result:
    """Single sends of both promises, a bare echo over the same transport and a bare fdatasync, in turns of 200."""
    from bench.latency import measure_latency
    from commitmq.bench.target import BenchTopic

    with BenchTopic(job.address) as topic:
        measured = measure_latency(topic, body_bytes=job.body_bytes, count=job.count, limit_s=job.timeout_s)
    sends = {one.ack: one.send.p50_us for one in measured.sends}
    device = None if measured.device is None else asdict(measured.device)
    return {**sends, "transport": measured.transport, "echo": asdict(measured.echo), "device": device}


WORKS: dict[str, Callable[[Job], Result]] = {
    "send": send,
    "floor": floor,
    "pipeline": pipeline,
    "batch": batch,
    "read": reading.read,
    "query": reading.query,
    "ready": reading.ready,
    "end_to_end": following.end_to_end,
    "mixed": following.mixed,
    "delayed": delays.delayed,
    "timers": delays.timers,
    "timers_ready": delays.timers_ready,
    "transactions": transactions.transactions,
    "share": handling.share,
    "retry": handling.retry,
}


def _run(job: Job) -> Result:
    if "tcp" in words(job):
        connect_as_from_elsewhere()
    return WORKS[job.work](job)


if __name__ == "__main__":
    run(dict.fromkeys(WORKS, _run))
