"""``commitmq consume TOPIC``: messages of a topic on standard output."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Final

import click

from commitmq.cli.options import node_option
from commitmq.cli.output import complain
from commitmq.cli.quantity import MAX_INT, parse_position, parse_time, seconds
from commitmq.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from commitmq.client.consumer import Consumer, Reader
    from commitmq.client.message import Message


@click.command()
@click.argument("topic")
@click.option("--group", help="Read as a member of this group and commit. Default: read everything, commit nothing.")
@click.option(
    "--from",
    "start",
    metavar="earliest|latest|TIME|OFFSET",
    help="Where to begin (with a group: in queues without a committed offset). TIME is ISO 8601, UTC unless it says "
    "otherwise; OFFSET a queue offset.  [default: earliest]",
)
@click.option(
    "--queue", "queues", type=click.IntRange(0, MAX_INT), multiple=True, help="Only this queue; may be repeated."
)
@click.option(
    "--until", metavar="TIME", help="Only what was stored before TIME: ISO 8601, UTC unless it says otherwise."
)
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many messages.")
@click.option("--follow", "-f", is_flag=True, help="Wait for new messages until interrupted.")
@click.option("--tags", "expression", default="*", metavar="EXPR", help="Only these tags: 'TagA || TagB'.")
@click.option(
    "--sql", metavar="EXPR", help="Only where this is true of the properties: \"price > 10 AND region = 'eu'\"."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "jsonl", "raw", "hex"]),
    default="text",
    show_default=True,
    help="text: the bodies, one a line. raw: the bodies, nothing between them. hex: bodies in hexadecimal digits, one a line."
    " jsonl: one JSON object a message.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@click.option(
    "--timeout",
    type=seconds(),
    default=5.0,
    show_default=True,
    help="Stop when the end was not reached and nothing came for this many seconds (not with --follow).",
)
@node_option
def consume(
    topic: str,
    group: str | None,
    start: str | None,
    queues: tuple[int, ...],
    until: str | None,
    limit: int | None,
    follow: bool,
    expression: str,
    sql: str | None,
    form: str,
    as_json: bool,
    timeout: float,
    node: str,
) -> None:
    """Read messages of TOPIC: all there are now, or with --follow also those to come.

    \b
    Example: commitmq consume orders --queue 0 --from 2026-06-01 --until 2026-06-02 --format jsonl
    """
    from commitmq.client.admin import Admin
    from commitmq.client.consumer import Consumer, Reader
    from commitmq.client.selector import Sql, selector

    if sql is not None and expression != "*":
        raise click.UsageError("give --tags or --sql, not both; in SQL the tag is the property TAGS")
    try:
        wanted = selector(expression) if sql is None else Sql(sql)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--tags") from None
    if group is not None and (queues or until is not None):
        raise click.UsageError(
            "a member of a group reads the queues that it gets, so --group excludes --queue and --until"
        )
    if follow and until is not None:
        raise click.UsageError("give --follow or --until, not both")
    where = parse_position(start or "earliest", "--from")
    ends: dict[tuple[str, int], int] = {}
    with Admin(node) as admin:
        try:
            bounds = admin.offsets(topic, None if until is None else parse_time(until, "--until"))
            ends = {(topic, one.queue): one.max if one.by_time is None else one.by_time for one in bounds}
            if missing := set(queues) - {one.queue for one in bounds}:
                raise click.BadParameter(f"topic {topic} has no queue {min(missing)}", param_hint="--queue")
        except RequestError as error:
            if error.code != "TOPIC_NOT_EXIST" or not follow:
                raise
    write = _write_json if as_json or form == "jsonl" else _WRITERS[form]
    # Closed explicitly: an interrupt between two batches is a normal end, and messages already written are committed.
    consumer: Consumer | Reader
    if group is None:
        chosen = [(topic, queue) for queue in queues] or None
        topics = () if chosen else topic
        consumer = Reader(topics, queues=chosen, node=node, start=where, filter=wanted)
    else:
        consumer = Consumer(topic, group=group, node=node, start=where, filter=wanted)
    whole = False
    try:
        _copy(consumer, write, ends, limit=limit, follow=follow, timeout=timeout, only_below=until is not None)
        whole = True
    except _InterruptedError as error:
        whole = error.between_batches
        if not follow:
            raise click.Abort from None
    except BrokenPipeError:
        # The reader of this command's output has gone. Python would report the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        consumer.close(commit=whole)


class _InterruptedError(Exception):
    """Ctrl-C; ``between_batches``: all polled messages have been written."""

    def __init__(self, between_batches: bool) -> None:
        super().__init__("interrupted")
        self.between_batches = between_batches


def _copy(
    consumer: Consumer | Reader,
    write: Callable[[Message], None],
    ends: dict[tuple[str, int], int],
    *,
    limit: int | None,
    follow: bool,
    timeout: float,
    only_below: bool = False,
) -> None:
    """Poll and write until the limit, the end or (with ``follow``) an interrupt.

    ``only_below``: leave out what lies at or behind ``ends``.
    """
    left = limit
    below = {queue: end for (_, queue), end in ends.items()}
    quiet_since = time.monotonic()
    writing = interrupted = False

    def interrupt(_signal: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        # A poll ends soon by itself; writing may not, when the reader of the output has stopped reading.
        if writing:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        while left is None or left > 0:
            if interrupted:
                raise _InterruptedError(between_batches=True)
            if not follow and _at_end(consumer, ends):
                return
            batch = consumer.poll(0.25, 10_000 if left is None else min(left, 10_000))
            writing = True
            if batch:
                wanted = (
                    [one for one in batch if one.queue_offset < below.get(one.queue_id, 0)] if only_below else batch
                )
                for message in wanted:
                    write(message)
                sys.stdout.buffer.flush()
                quiet_since = time.monotonic()
                left = None if left is None else left - len(wanted)
            elif not follow and time.monotonic() - quiet_since >= timeout:
                return
            writing = False
    except KeyboardInterrupt:
        raise _InterruptedError(between_batches=False) from None
    finally:
        # The flag outlives the exception, which is lost when it happens to be raised in a finalizer.
        writing = False
        signal.signal(signal.SIGINT, previous)


def _at_end(consumer: Consumer | Reader, ends: dict[tuple[str, int], int]) -> bool:
    """Whether every message that existed when the command began was read, in the queues of this consumer."""
    positions = consumer.positions
    return bool(positions) and all(offset >= ends.get(queue, 0) for queue, offset in positions.items())


def _body_of(message: Message) -> bytes:
    """The body as the node has it; a body that cannot be decoded is complained of."""
    if message.damage is not None:
        place = f"{message.topic}/{message.queue_id}@{message.queue_offset}"
        complain(f"message {place} has a body that cannot be decoded, written as it is stored: {message.damage}")
    return bytes(message.raw_body)


def _write_text(message: Message) -> None:
    sys.stdout.buffer.write(_body_of(message) + b"\n")


def _write_raw(message: Message) -> None:
    sys.stdout.buffer.write(_body_of(message))


def _write_hex(message: Message) -> None:
    sys.stdout.buffer.write(_body_of(message).hex().encode() + b"\n")


_WRITERS: Final[Mapping[str, Callable[[Message], None]]] = {"text": _write_text, "raw": _write_raw, "hex": _write_hex}


def _write_json(message: Message) -> None:
    import orjson

    sys.stdout.buffer.write(orjson.dumps(message.to_json(), option=orjson.OPT_APPEND_NEWLINE))
