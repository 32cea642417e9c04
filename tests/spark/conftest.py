"""One Spark session for all tests here: a JVM takes ten seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from commitmq_plugins.spark.sessions import QUICK_START, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores, set up to start quickly. Tests may change SQL settings, and must change them back."""
    from pyspark import SparkContext

    found = session("local[2]", app="tests", **QUICK_START)
    found.sparkContext.setLogLevel("ERROR")
    gateway = SparkContext._gateway
    yield found
    found.stop()
    if gateway is not None:
        # The JVM ends when its standard input does.
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=60)
