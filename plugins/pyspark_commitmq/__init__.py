"""Spark finds ``format("commitmq")`` by this package: it imports modules called ``pyspark_…`` and looks for this class."""

from commitmq_plugins.spark.source import CommitMQSource as DefaultSource

__all__ = ["DefaultSource"]
