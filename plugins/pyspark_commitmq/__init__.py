"""Makes ``format("commitmq")`` known to Spark by itself: Spark imports modules called ``pyspark_…`` and looks for this."""

from commitmq_plugins.spark.source import CommitMQSource as DefaultSource

__all__ = ["DefaultSource"]
