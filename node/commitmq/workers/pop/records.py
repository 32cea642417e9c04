"""Check points, acks and revived messages as runs for the writer (spec 12.6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Final

import numpy as np

from commitmq.config import NodeConfig
from commitmq.format.constants import Host, Property
from commitmq.format.record import Record, encode_record
from commitmq.semantics.fitting import first_that_fits
from commitmq.semantics.pop_revive import Ack, CheckPoint, ack_record, check_point_record, checked_topic, retries
from commitmq.semantics.retry import TO_DEAD_LETTERS, copies
from commitmq.semantics.timer import TimerRules, timer_request
from commitmq.store.log.run_check import CheckedRun
from commitmq.workers.runtime.run_mover import MovedRun

_RUN_BYTES: Final = 1 << 20


class Records:
    """Makes the records of one node. ``cluster`` names the revive topic."""

    def __init__(self, config: NodeConfig, cluster: str) -> None:
        self.cluster = cluster
        self.broker_name = config.network.broker_name
        self.host = Host(config.network.store_host, config.network.store_port)
        self.v6 = ":" in config.network.store_host
        self._crc = config.commit_log.append_properties_crc
        self._rules = TimerRules(max_delay_s=1 << 40)  # an ack comes when its check point does, whatever the clock said
        self._v2 = config.pop.retry_topics_v2
        self._run_bytes = min(_RUN_BYTES, config.commit_log.max_run_bytes)

    def check_point(self, point: CheckPoint, revive_queue: int, now_ms: int) -> Record:
        """The record of ``point``, in the timer topic."""
        return self._timer(check_point_record(point, self.cluster, revive_queue, now_ms, self.host), now_ms)

    def ack(self, ack: Ack, invisible_ms: int, revive_queue: int, now_ms: int) -> Record:
        """The record of ``ack``: in the timer topic, or in the revive topic when the messages are overdue."""
        return self._timer(ack_record(ack, invisible_ms, self.cluster, revive_queue, now_ms, self.host), now_ms)

    def _timer(self, record: Record, now_ms: int) -> Record:
        return timer_request(record, now_ms, self._rules, fresh=True) or record

    def again(self, record: Record, point: CheckPoint, max_retries: int) -> Record:
        """What ``record`` becomes that was not acked: a message of the retry topic; a dead letter after the last try, and
        where no retry fits. Raises InvalidMessageError when that does not fit either.
        """
        return first_that_fits(self._copies(record, point, max_retries), self.encoded)[0]

    def _copies(self, record: Record, point: CheckPoint, max_retries: int) -> Iterator[Record]:
        if record.reconsume_times < max_retries:
            yield from retries(record, point, self.host, v2=self._v2)
        popped = {**record.properties}
        popped.setdefault(Property.RETRY_TOPIC, checked_topic(point))
        source = replace(record, properties=popped)
        for dead in copies(source, point.key.group, 0, delay_level=TO_DEAD_LETTERS):
            yield replace(dead.record, born_host=self.host)

    def encoded(self, record: Record) -> bytes:
        """The bytes that the writer gets."""
        if record.store_host != self.host:
            record = replace(record, store_host=self.host)
        return encode_record(record, buckets=None, properties_crc=self._crc)

    def runs(self, records: Iterable[Record]) -> list[tuple[MovedRun, list[int]]]:
        """``records`` as runs, each of one queue and layout, with the numbers of its records; order is kept in a queue."""
        by_place: dict[tuple[str, int, bool], list[tuple[int, bytes]]] = {}
        for number, record in enumerate(records):
            place = record.topic, record.queue_id, ":" in record.born_host.ip
            by_place.setdefault(place, []).append((number, self.encoded(record)))
        return [
            (MovedRun(topic, queue, run, v6), numbers)
            for (topic, queue, v6), many in by_place.items()
            for run, numbers in self._parts(many)
        ]

    def _parts(self, many: list[tuple[int, bytes]]) -> Iterator[tuple[CheckedRun, list[int]]]:
        start = size = 0
        for index, (_, data) in enumerate(many):
            if index > start and size + len(data) > self._run_bytes:
                yield _run(many[start:index])
                start, size = index, 0
            size += len(data)
        if start < len(many):
            yield _run(many[start:])


def _run(many: list[tuple[int, bytes]]) -> tuple[CheckedRun, list[int]]:
    records = [data for _, data in many]
    ends = np.array(list(accumulate(map(len, records))), np.int64)
    return CheckedRun(np.frombuffer(b"".join(records), np.uint8), ends, len(many)), [number for number, _ in many]
