"""Spark reads the store's own files: a data source, sinks and jobs, as a plugin that needs the extra ``commitmq[spark]``.

    from commitmq_plugins.spark import session
    session("local[4]").read.format("commitmq").option("store", "/data/store").option("topics", "orders").load()

Only Java and PySpark are heavy, and neither is imported before it is used: every node loads this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commitmq.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from commitmq_plugins.spark.sessions import session

__all__ = ["session"]


def __getattr__(name: str) -> Any:
    if name == "session":
        from commitmq_plugins.spark.sessions import session

        return session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@hookimpl
def commitmq_register_commands(cli: click.Group) -> None:
    """The verb ``pipeline``."""
    from commitmq_plugins.spark.commands import pipeline

    cli.add_command(pipeline)
