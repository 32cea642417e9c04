"""The process from which a local Spark forks its Python workers, with what a CommitMQ source needs imported once.

Spark starts a worker to create a source, another to plan each read, and some to read. Each imports NumPy, PyArrow and the
source again, 0.1 to 0.2 s a time, unless the process that they are forked from has them. Spark takes this module by its
setting ``spark.python.daemon.module``; :func:`commitmq_plugins.spark.session` sets it for local masters, whose workers
surely can import it.

A worker whose JVM closed the connection (a task that needs no more rows, or the end of the program) ends without a word:
Spark's own prints the traceback of a BrokenPipeError.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyspark.sql.worker.create_data_source
import pyspark.sql.worker.plan_data_source_read
import pyspark.worker
from pyspark import daemon

import commitmq_plugins.spark.reading
import commitmq_plugins.spark.source

IMPORTED = (
    np, pa, pyarrow.compute, pyspark.worker, pyspark.sql.worker.create_data_source,
    pyspark.sql.worker.plan_data_source_read, commitmq_plugins.spark.reading, commitmq_plugins.spark.source,
)  # fmt: skip

_work = daemon.worker


def quiet_worker(sock: Any, authenticated: bool) -> int:
    """``pyspark.daemon.worker``, which ends this process where nobody listens any more."""
    try:
        return int(_work(sock, authenticated))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)


if __name__ == "__main__":
    daemon.worker = quiet_worker
    daemon.manager()
