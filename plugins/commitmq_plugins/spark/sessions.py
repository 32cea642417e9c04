"""A Spark session that is ready: Java found, workers run this Python, the source registered."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from commitmq.errors import CommitMQError
from commitmq_plugins.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
}
# For a driver whose executors are on this machine: nothing has to be found by name, and Unix sockets are quicker.
LOCAL: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.shuffle.partitions": "2",
}
QUICK_START: Final = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled": "false",
}
"""For short jobs and tests: a third less time until the first result, and slower work afterwards."""


class SparkMissingError(CommitMQError):
    """PySpark is not installed."""


def session(master: str = "local[2]", *, app: str = "commitmq", **config: object) -> SparkSession:
    """A Spark session on ``master``; ``config`` are Spark's own settings: ``session(**{"spark.driver.memory": "2g"})``.

    One that exists already in this process is used, with ``config`` applied as far as Spark can. Raises
    SparkMissingError or JavaMissingError with what to install.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkMissingError(f"PySpark is missing ({error}): pip install 'commitmq[spark]'") from error
    from commitmq_plugins.spark.source import CommitMQSource

    settings: dict[str, object] = {**DEFAULTS, **(LOCAL if master.startswith("local") else {}), **config}
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in settings.items():
        builder = builder.config(name, str(value).lower() if isinstance(value, bool) else str(value))
    with _environment(is_local=master.startswith("local")):
        found = builder.getOrCreate()
    # Spark finds it by itself where its workers can import pyspark_commitmq, and warns of a second registration.
    manager = found._jsparkSession.sessionState().dataSourceManager()
    if not manager.dataSourceExists(CommitMQSource.name()):
        found.dataSource.register(CommitMQSource)
    return found


@contextlib.contextmanager
def _environment(*, is_local: bool) -> Iterator[None]:
    """What Spark takes from the environment when it starts its JVM, and only then."""
    wanted = {"JAVA_HOME": str(find_java().home), "PYSPARK_PYTHON": sys.executable}
    if is_local:
        # Otherwise it looks for another address of this host and warns about what it finds.
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
