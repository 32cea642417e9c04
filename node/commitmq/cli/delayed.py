"""``commitmq delayed list|recall``: the messages that wait for their time."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from commitmq.cli.options import admin_options
from commitmq.cli.output import complain, print_either, print_json, print_table
from commitmq.cli.quantity import MAX_INT

if TYPE_CHECKING:
    from commitmq.client.admin import Admin


@click.group()
def delayed() -> None:
    """List messages that wait for their time; cancel one."""


@delayed.command(name="list")
@click.option("--topic", help="Only messages that will be delivered to this topic.")
@click.option(
    "--max", "max_messages", type=click.IntRange(1, MAX_INT), default=64, show_default=True, help="Messages to list."
)
@click.option("--most-read", type=click.IntRange(1, MAX_INT), default=100_000, show_default=True,
              help="Messages to read at most.")  # fmt: skip
@admin_options
def list_(topic: str | None, max_messages: int, most_read: int, as_json: bool, admin: Admin) -> None:
    """List the messages that are due first.

    The list is approximate: a message that was delivered in the last seconds may be in it, and one that was sent a moment
    ago may be missing. When --most-read or --max ends it before everything was seen, it says so; it may have cancelled
    messages then.
    """
    found = admin.delayed(topic, max_messages=max_messages, most_read=most_read)
    if as_json:
        print_json(
            {"complete": found.complete, "read": found.read, "messages": [one.to_json() for one in found.messages]}
        )
        return
    now_ms = time.time_ns() // 1_000_000
    print_table(
        ("ID", "TOPIC", "QUEUE", "DUE", "IN_S", "LEVEL", "KEYS"),
        [
            (one.unique_id, one.topic, one.queue, _time(one.due), _left(one.due - now_ms), one.level or "-", one.keys)
            for one in found
        ],
        left=(0, 1, 3, 6),
    )  # fmt: skip
    if not found.complete:
        complain(f"there may be more messages that wait: {found.read} were read, and {len(found)} are listed")


@delayed.command()
@click.argument("which", metavar="HANDLE|ID")
@admin_options
def recall(which: str, as_json: bool, admin: Admin) -> None:
    """Cancel the waiting message with this recall handle or unique id: no consumer gets it.

    That is possible until half a second before the second in which it is due, and not for a message at a delay level.
    """
    handle = admin.delayed_recall(which)
    print_either(as_json, {"recall_handle": handle}, "cancelled")


def _left(ms: int) -> str:
    return f"{ms / 1000:.1f}"


def _time(ms: int) -> str:
    """``ms`` since 1970 as ISO 8601, UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
