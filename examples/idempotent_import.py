"""An import that stops in the middle is repeated as a whole, and no row is stored twice.
Run `python examples/idempotent_import.py 600`, which stops after 600 rows, then `python examples/idempotent_import.py`.
"""

from __future__ import annotations

import sys

from commitmq import ExactlyOnce, Producer

TOPIC = "example-ledger"
ROWS = 1_000
CHUNK = 200


def main(stop_after: int = ROWS) -> None:
    rows = [b"row %d" % number for number in range(ROWS)]
    new = known = 0
    # The id outlives the program. Messages of one id, epoch and queue are numbered from 0 on, and a message with the number
    # of a stored one is that one: each run must send the same rows in the same order to the same queue.
    with Producer(delivery=ExactlyOnce("example-import/2026-11", 0)) as producer:
        for start in range(0, stop_after, CHUNK):
            for sent in producer.send_batch(TOPIC, rows[start : start + CHUNK], queue=0):
                known += sent.duplicate
                new += not sent.duplicate
    print(f"{new} rows stored, {known} were stored before")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:2]))
