"""Verbs that cannot do without the extra ``commitmq[node]``: they say so before they do anything."""

from __future__ import annotations

from typing import Any

import click

from commitmq.extras import need_node


class NodeVerb(click.Command):
    """A command that runs where the extra ``node`` is installed. Elsewhere it raises MissingExtraError; its help is there."""

    def invoke(self, ctx: click.Context) -> Any:
        need_node(f"`{ctx.command_path}`")
        return super().invoke(ctx)
