"""Verbs that need the extra ``commitmq[node]``: without it they fail with a sentence before they do anything."""

from __future__ import annotations

from typing import Any

import click

from commitmq.extras import need_node


class NodeVerb(click.Command):
    """A command that needs the extra ``node``. Without the extra it raises MissingExtraError; its help still works."""

    def invoke(self, ctx: click.Context) -> Any:
        need_node(f"`{ctx.command_path}`")
        return super().invoke(ctx)
