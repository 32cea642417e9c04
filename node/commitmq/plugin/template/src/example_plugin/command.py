"""``commitmq example-plugin``: asks the dispatcher of a running node."""

from __future__ import annotations

import click


@click.command("example-plugin")
@click.argument("topic", required=False)
@click.option("--node", envvar="COMMITMQ_NODE", default="tcp://127.0.0.1:7310", show_default=True, metavar="ADDRESS")
def command(topic: str | None, node: str) -> None:
    """Show messages and bytes of TOPIC, or of all topics."""
    from commitmq import Admin

    with Admin(node) as admin:
        answer = admin.dispatcher_query("example_plugin", {"topic": topic} if topic else {})
    for name, messages, size in answer["topics"]:
        click.echo(f"{name}  {messages} messages  {size} bytes")
