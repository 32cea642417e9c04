"""The process from which a local Spark forks its Python workers. It has imported the modules of a CommitMQ source once.

Spark starts a worker to create a source, another to plan each read, and some to read. Each imports NumPy, PyArrow and
the source again, 0.1 to 0.2 s a time, unless its parent has imported them. Spark takes this module by its setting
``spark.python.daemon.module``; :func:`commitmq_plugins.spark.session` sets it for local masters: their workers can
import it.

A worker whose JVM closed the connection (a task that needs no more rows, or the end of the program) ends silently:
Spark's own worker prints the traceback of a BrokenPipeError.
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
    """``pyspark.daemon.worker``, which ends this process when the JVM has closed the connection."""
    try:
        return int(_work(sock, authenticated))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)


if __name__ == "__main__":
    daemon.worker = quiet_worker
    daemon.manager()
