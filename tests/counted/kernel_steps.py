"""The kernels' work on a run, from its check to its dispatch, so that instructions can be counted: see :mod:`ptrace`.

    python kernel_steps.py BODY_BYTES

Each step is done for few messages and for more, as parts of their own: what one message takes is the difference, in which the
work that belongs to a call (Python's, Cython's) cancels.
"""

from __future__ import annotations

import gc
import mmap
import sys

import numpy as np
import ptrace

from commitmq.client.sending.run_encoder import RunLayout, encode_run
from commitmq.format.constants import Host
from commitmq.format.message_id import UniqueIds, pack_host
from commitmq.kernels import codes, compiled
from commitmq.kernels.compiled import crc32
from commitmq.store.log.append import CommitLogAppender

STEPS = ("check_run", "store_run", "walk", "crc32")
FEW, MORE = 4, 12
CRC_UNIT_BYTES = 1024
_SEGMENT_BYTES = 1 << 20
_WARM = 12  # Python looks at code again, and rewrites it, when it is called for the eighth time


def number_of(step: str, count: int) -> int:
    """The part in which ``step`` is done for ``count`` messages."""
    return 2 * STEPS.index(step) + 1 + (count == MORE)


def per_message(counts: dict[str, int], step: str) -> float:
    """Instructions of ``step`` for one message more."""
    few, more = (counts[str(number_of(step, count))] for count in (FEW, MORE))
    return (more - few) / (MORE - FEW)


def crc_of(counts: dict[str, int], size: int) -> float:
    """Instructions of ISA-L's CRC-32 of ``size`` bytes here: it has code of its own for each generation of processors."""
    return per_message(counts, "crc32") * size / CRC_UNIT_BYTES


def main(body_bytes: int) -> None:
    """Each step of each size some times unseen, so that everything is loaded and cached, then once between marks."""
    gc.disable()
    layout = RunLayout("counted", born_v6=False, store_v6=False, properties_crc=True)
    host = pack_host(Host("127.0.0.1", 0))
    ids = UniqueIds()
    segment = mmap.mmap(-1, _SEGMENT_BYTES)
    array = np.frombuffer(segment, np.uint8)
    properties = b"TAGS\x01red\x02KEYS\x01order-1234\x02"
    for count in (FEW, MORE):
        bodies = [bytes(body_bytes)] * count
        rows, topics = np.zeros(count + 1, codes.ROW), np.zeros((count + 1, 2), np.int64)
        table, out = np.full(256, -1, np.int32), np.zeros(4, np.int64)
        for turn in range(_WARM + 1):
            seen = turn == _WARM
            appender = CommitLogAppender(
                0,
                segment_bytes=_SEGMENT_BYTES,
                open_segment=lambda _base: segment,
                close_segment=lambda _mapping: None,
                store_host=host,
                max_message_bytes=1 << 20,
                properties_crc=True,
            )
            run = encode_run(layout, 0, bodies, properties, ids, born=1_700_000_000_000)
            if seen:
                ptrace.mark(number_of("check_run", count))
            checked = appender.check_run(run.data, b"counted", 0, born_v6=False)
            ptrace.mark(ptrace.END)
            if seen:
                ptrace.mark(number_of("store_run", count))
            done = appender.append_run(checked, 0, host)
            ptrace.mark(ptrace.END)
            if seen:
                ptrace.mark(number_of("walk", count))
            compiled.walk(array, 0, done.end, 0, rows, topics, table, out)
            ptrace.mark(ptrace.END)
            if int(out[0]) != count:
                raise RuntimeError(f"{count} records were stored, {int(out[0])} found")
            table[:] = -1
            content = np.zeros(count * CRC_UNIT_BYTES, np.uint8)
            content.flags.writeable = False
            if seen:
                ptrace.mark(number_of("crc32", count))
            crc32(content, 0, count * CRC_UNIT_BYTES, 0)
            ptrace.mark(ptrace.END)


if __name__ == "__main__":
    main(int(sys.argv[1]))
