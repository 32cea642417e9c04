"""Appends the records of this process through the writer, those of one queue together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from commitmq import failpoints
from commitmq.format.constants import Host, Property
from commitmq.format.record import Record, encode_record
from commitmq.store.log.run_check import CheckedRun
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.isolation import is_of_message
from commitmq.workers.runtime.run_mover import MovedRun, Put, RunMover
from commitmq.workers.transaction.ledger import Place

MOST_BYTES = 16 << 20
"""Of bodies that are appended together: they are copied several times on their way."""
_MOST_RUN_BYTES = 1 << 20
_CRC_DIGITS = 10
_LOOK_S = 0.05


@dataclass(slots=True)
class Append:
    """A record to append. Afterwards ``place`` is where it is, or ``code`` and ``sentence`` say why it is not stored;
    ``retry``: waiting may help.
    """

    record: Record
    place: Place | None = None
    code: str = ""
    sentence: str = ""
    retry: bool = False


@dataclass(slots=True)
class _Run:
    data: list[bytes]
    appends: list[Append]
    size: int = 0


class Appends:
    """The way to the writer."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._context = context
        self.way = RunMover(context)
        self.host = Host(config.network.store_host, config.network.store_port)
        self._has_crc = config.commit_log.append_properties_crc
        self._run_bytes = min(_MOST_RUN_BYTES, config.commit_log.max_run_bytes)

    def writer_serves(self) -> bool:
        """Wait for the writer. False when this process shall stop first."""
        while not self._context.stopping:
            if self.way.writer_lives:
                return True
            self._context.wait(0)  # requests may wait meanwhile: they would end a longer wait at once
            time.sleep(_LOOK_S)
        return False

    @property
    def writer_lives(self) -> bool:
        """Whether the writer serves."""
        return self.way.writer_lives

    def put(self, name: str, appends: Sequence[Append], ack: str = "flushed") -> None:
        """Append all, and wait for the acks. ``name`` is that of the failpoints. Raises WriterLost."""
        runs = self._runs(appends)
        if not runs:
            return
        if failpoints.ACTIVE:
            failpoints.hit(f"transaction.before_{name}")
        again: list[Append] = []
        for run, (moved, put) in zip(runs, self._sent(runs, ack), strict=True):
            if put.code and len(run.appends) > 1 and not put.retry:
                again += run.appends  # one of them is not as it should be: each for itself
            else:
                _note(run, moved, put)
        for one in again:
            for run in self._runs([one]):
                _note(run, *self._sent([run], ack)[0])
        if failpoints.ACTIVE:
            failpoints.hit(f"transaction.after_{name}")

    def _sent(self, runs: Sequence[_Run], ack: str) -> list[tuple[MovedRun, Put]]:
        moved = []
        for run in runs:
            first = run.appends[0].record
            ends = np.cumsum([len(one) for one in run.data], dtype=np.int64)
            checked = CheckedRun(np.frombuffer(b"".join(run.data), np.uint8), ends, len(run.data), moved=True)
            moved.append(MovedRun(first.topic, first.queue_id, checked, ":" in first.born_host.ip))
        return list(zip(moved, self.way.put(moved, ack), strict=True))

    def _runs(self, appends: Sequence[Append]) -> list[_Run]:
        open_runs: dict[tuple[str, int, bool], _Run] = {}
        runs: list[_Run] = []
        for one in appends:
            try:
                data = self._encoded(one.record)
            except Exception as error:
                if not is_of_message(error):
                    raise
                one.code, one.sentence = "MESSAGE_ILLEGAL", str(error) or repr(error)
                continue
            key = one.record.topic, one.record.queue_id, ":" in one.record.born_host.ip
            run = open_runs.get(key)
            if run is None or run.size + len(data) > self._run_bytes:
                run = open_runs[key] = _Run([], [])
                runs.append(run)
            run.data.append(data)
            run.appends.append(one)
            run.size += len(data)
        return runs

    def _encoded(self, record: Record) -> bytes:
        properties = record.properties
        if self._has_crc:  # the writer fills it in
            properties = {**properties, Property.CRC32: "0" * _CRC_DIGITS}
        return encode_record(replace(record, store_host=self.host, properties=properties), buckets=None)

    def close(self) -> None:
        self.way.close()


def _note(run: _Run, moved: MovedRun, put: Put) -> None:
    places = [] if put.code else put.places(moved.run)
    for index, one in enumerate(run.appends):
        if put.code:
            one.code, one.sentence, one.retry = put.code, put.sentence, put.retry
        else:
            one.code = ""
            one.place = Place(*places[index]) if index < len(places) else Place(-1, -1)
