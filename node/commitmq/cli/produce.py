"""``commitmq produce TOPIC``: sends lines or JSON lines from a file or standard input as messages."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from commitmq.cli.input_lines import BadLineError, Ending, UnreadableError, input_lines
from commitmq.cli.line_sender import LineSender
from commitmq.cli.message_lines import message_of_json, message_of_line
from commitmq.cli.output import complain, fail, json_option, node_option, print_json
from commitmq.cli.progress import can_draw
from commitmq.cli.quantity import MAX_INT, seconds
from commitmq.errors import CommitMQError, ConfigError

if TYPE_CHECKING:
    from commitmq.client.producer import Producer


@click.command()
@click.argument("topic")
@click.option(
    "--file", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Default: standard input."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["lines", "jsonl"]),
    default="lines",
    show_default=True,
    help="lines: each line is a body. jsonl: each line is an object with body (or body_base64) and optionally tags, "
    "key, keys, properties, sharding_key, flag, or tombstone: true and no body; `consume --json` writes such lines.",
)
@click.option("--batch", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Messages per batch.")
@click.option("--tags", help="Tag of every message (format lines).")
@click.option("--keys", help="Key of every message, several with spaces between (format lines).")
@click.option("--key", help="Key of every message: it finds the message and chooses the queue (format lines).")
@click.option("--queue", type=click.IntRange(0, MAX_INT), help="Send everything to this queue.")
@click.option(
    "--ack",
    type=click.Choice(["flushed", "memory"]),
    default="flushed",
    show_default=True,
    help="The ack that each batch waits for.",
)
@click.option("--compress", type=click.Choice(["zlib", "lz4", "zstd"]), help="Compress larger bodies.")
@click.option("--idempotent", is_flag=True, help="Send unanswered messages again; the node stores each once.")
@click.option(
    "--producer-id",
    metavar="ID",
    help="Idempotent under this name: the same input sent again, with the same queue, stores only the missing messages.",
)
@click.option("--timeout", type=seconds(0.001), default=10.0, show_default=True, help="Seconds per batch.")
@json_option
@node_option
def produce(
    topic: str,
    path: Path | None,
    form: str,
    batch: int,
    tags: str | None,
    keys: str | None,
    key: str | None,
    queue: int | None,
    ack: str,
    compress: str | None,
    idempotent: bool,
    producer_id: str | None,
    timeout: float,
    as_json: bool,
    node: str,
) -> None:
    """Send lines or JSON lines to TOPIC.

    Empty lines are skipped. A line waits at most 50 ms for others to be sent with. A line that is no message ends the
    command with its number, after all lines before it were stored; a failed send ends it too, with the number of stored
    messages. Ctrl-C and SIGTERM end it when all lines read so far are stored; a second one ends it at once.
    """
    from commitmq.client.message import check_topic
    from commitmq.client.sending.options import ExactlyOnce

    if form == "jsonl" and (tags or keys or key):
        raise click.UsageError("with --format jsonl each line has its own tags and keys")
    if key is not None and keys is not None:
        raise click.UsageError("give --key or --keys")
    if producer_id is not None and queue is None and form == "lines":
        raise click.UsageError("--producer-id needs --queue: a repetition must send to the same queue")
    check_topic(topic)
    delivery = ExactlyOnce(producer_id) if idempotent or producer_id is not None else None
    sender = LineSender(topic, queue, batch, message_of_json if form == "jsonl" else message_of_line(tags, keys, key))
    source: BinaryIO = sys.stdin.buffer if path is None else path.open("rb")
    started = time.perf_counter()
    with (
        _failures_with_progress(sender),
        source,
        _bar(path) as advance,
        _producer(node, ack=ack, timeout_s=timeout, compress=compress, delivery=delivery) as producer,
        Ending() as ending,
    ):
        sender.send_all(producer, input_lines(source.fileno(), advance, ending))
    if ending.signal is not None:
        left_out = "; the last line was not whole and is left out" if ending.left_out else ""
        complain(f"ended by {ending.signal.name}; {sender.stored} messages are stored{left_out}")
        raise click.Abort
    took_s = time.perf_counter() - started
    if as_json:
        print_json(
            {"topic": topic, "messages": sender.stored, "empty_lines": sender.empty, "seconds": round(took_s, 6)}
        )
        return
    left_out = f", {sender.empty} empty lines left out" if sender.empty else ""
    click.echo(f"{sender.stored} messages stored in {topic} in {took_s:.2f} s ({ack}){left_out}")


@contextmanager
def _failures_with_progress(sender: LineSender) -> Iterator[None]:
    """A failure inside ends the command with a sentence that tells how many messages are stored."""
    try:
        yield
    except BadLineError as error:
        fail(f"line {error.number}: {error.reason}; {sender.stored} messages before it are stored")
    except UnreadableError as error:
        fail(f"the input cannot be read: {error}; {sender.stored} messages are stored")
    except KeyboardInterrupt:
        complain(f"interrupted; {sender.stored} messages are stored")
        raise click.Abort from None
    except ConfigError:
        raise  # nothing was sent
    except CommitMQError:
        # The error itself ends the command with its own exit code; this line reports how far the command got.
        complain(f"{sender.stored} messages are stored, up to line {sender.last_line}")
        raise


def _producer(node: str, **settings: Any) -> Producer:
    from commitmq.client.producer import Producer
    from commitmq.client.sending import batch_plan

    del batch_plan  # the first batch needs it: importing it here keeps the import out of the batch's time
    try:
        return Producer(node, **settings)
    except ConfigError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@contextmanager
def _bar(path: Path | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, fed with bytes read; nothing when none can be drawn."""
    if not can_draw() or (path is None and sys.stdin.isatty()):
        yield lambda _bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("sending"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("sending", total=None if path is None else path.stat().st_size)
        yield lambda count: progress.advance(task, count)
