"""``commitmq produce TOPIC``: lines or JSON lines from a file or standard input become messages."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from commitmq.cli.output import complain, fail, json_option, node_option, print_json
from commitmq.errors import CommitMQError, InvalidMessageError, NodeUnavailableError, SendError

if TYPE_CHECKING:
    from commitmq.client.message import Message
    from commitmq.client.producer import Producer

_READ_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 64 * 1024 * 1024
_IDLE_S: Final = 0.2
_FIELDS: Final = {"body", "body_base64", "tags", "keys", "properties", "sharding_key", "flag"}

# What one line of input becomes: its number, and the message; None says that the input pauses.
Numbered = tuple[int, "Message | bytes"]


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
    "keys, properties, sharding_key, flag.",
)
@click.option("--batch", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Messages a batch.")
@click.option("--tags", help="Tag of every message (format lines).")
@click.option("--keys", help="Key of every message, several with spaces between (format lines).")
@click.option("--queue", type=click.IntRange(min=0), help="Send everything to this queue.")
@click.option(
    "--ack",
    type=click.Choice(["flushed", "memory"]),
    default="flushed",
    show_default=True,
    help="What each batch waits for.",
)
@click.option("--compress", type=click.Choice(["zlib", "lz4", "zstd"]), help="Compress larger bodies.")
@click.option("--idempotent", is_flag=True, help="Send again what was not answered; the node stores it once.")
@click.option(
    "--producer-id",
    metavar="ID",
    help="Idempotent under this name: the same input sent again, with the same queue, stores only what is missing.",
)
@click.option("--timeout", type=click.FloatRange(min=0.001), default=10.0, show_default=True, help="Seconds a batch.")
@json_option
@node_option
def produce(
    topic: str,
    path: Path | None,
    form: str,
    batch: int,
    tags: str | None,
    keys: str | None,
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

    Empty lines are left out. A line that is no message ends the command with its number, after what came before it was
    stored; so does a failed send, saying how many messages are stored.
    """
    if form == "jsonl" and (tags or keys):
        raise click.UsageError("with --format jsonl each line has its own tags and keys")
    if producer_id is not None and queue is None and form == "lines":
        raise click.UsageError("--producer-id needs --queue: a repetition must send to the same queue")
    sure: dict[str, Any] = {"idempotent": idempotent or producer_id is not None, "producer_id": producer_id}
    parse = _message_of_json if form == "jsonl" else _message_of_line(tags, keys)
    source: BinaryIO = sys.stdin.buffer if path is None else path.open("rb")
    started = time.perf_counter()
    state = _Progress()
    try:
        with (
            source,
            _bar(path) as advance,
            _producer(node, ack=ack, timeout_s=timeout, compress=compress, **sure) as producer,
        ):
            _send_all(producer, topic, queue, batch, _messages(source.fileno(), parse, state, advance), state)
    except _BadLineError as error:
        fail(f"line {error.number}: {error.reason}; {state.stored} messages before it are stored")
    except KeyboardInterrupt:
        complain(f"interrupted; {state.stored} messages are stored")
        raise click.Abort from None
    except CommitMQError as error:
        # The error itself ends the command with its own exit code; this says how far it got.
        complain(f"{state.stored} messages are stored, up to line {state.line}")
        if isinstance(error, SendError) and error.code == "NODE_UNAVAILABLE":
            raise NodeUnavailableError(error.message) from None
        raise
    seconds = time.perf_counter() - started
    if as_json:
        print_json({"topic": topic, "messages": state.stored, "empty_lines": state.empty, "seconds": round(seconds, 6)})
        return
    left_out = f", {state.empty} empty lines left out" if state.empty else ""
    click.echo(f"{state.stored} messages stored in {topic} in {seconds:.2f} s ({ack}){left_out}")


def _producer(node: str, **settings: Any) -> Producer:
    from commitmq.client.producer import Producer

    try:
        return Producer(node, **settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


class _Progress:
    """How far the command got: messages stored, the last line that is, empty lines seen."""

    def __init__(self) -> None:
        self.stored = 0
        self.line = 0
        self.empty = 0


class _BadLineError(Exception):
    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason


def _send_all(
    producer: Producer,
    topic: str,
    queue: int | None,
    batch: int,
    messages: Iterator[Numbered | None],
    state: _Progress,
) -> None:
    """Send in batches; a partial one when the input pauses, ends, or has a bad line."""
    waiting: list[Numbered] = []
    try:
        for one in messages:
            if one is not None:
                waiting.append(one)
            if waiting and (one is None or len(waiting) >= batch):
                _send_batch(producer, topic, queue, waiting, state)
                waiting = []
    except _BadLineError:
        if waiting:
            _send_batch(producer, topic, queue, waiting, state)
        raise
    if waiting:
        _send_batch(producer, topic, queue, waiting, state)


def _send_batch(producer: Producer, topic: str, queue: int | None, batch: list[Numbered], state: _Progress) -> None:
    from commitmq.client.results import BatchSendError

    try:
        producer.send_batch(topic, [message for _, message in batch], queue=queue)
    except BatchSendError as error:
        state.stored += error.stored
        if error.stored_prefix:
            state.line = batch[error.stored_prefix - 1][0]
        raise
    except InvalidMessageError as error:
        raise InvalidMessageError(f"lines {batch[0][0]} to {batch[-1][0]}: {error}") from error
    state.stored += len(batch)
    state.line = batch[-1][0]


# ---------------------------------------------------------------- input


def _messages(
    fd: int, parse: Callable[[bytes], Message | bytes], state: _Progress, advance: Callable[[int], None]
) -> Iterator[Numbered | None]:
    """Each line's number and message; None when no more input is there for now. Raises _BadLineError."""
    for number, line in _lines(fd, advance):
        if line is None:
            yield None
        elif not line:
            state.empty += 1
        else:
            try:
                yield number, parse(line)
            except (ValueError, CommitMQError) as error:
                raise _BadLineError(number, str(error)) from error


def _lines(fd: int, advance: Callable[[int], None]) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without their ends; (number, None) when reading would wait."""
    rest = b""
    number = 0
    while True:
        if not select.select([fd], [], [], _IDLE_S)[0]:
            yield number, None
            select.select([fd], [], [])
        data = os.read(fd, _READ_BYTES)
        advance(len(data))
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            number += 1
            yield number, line.removesuffix(b"\r")
        if len(rest) > _MAX_LINE_BYTES:
            raise _BadLineError(number + 1, f"it is longer than {_MAX_LINE_BYTES} bytes")
    if rest:
        yield number + 1, rest


def _message_of_line(tags: str | None, keys: str | None) -> Callable[[bytes], Message | bytes]:
    from commitmq.client.message import Message

    if tags is None and keys is None:
        return lambda line: line
    return lambda line: Message(line, tags=tags, keys=keys)


def _message_of_json(line: bytes) -> Message:
    """The message that one JSON line describes. Raises ValueError or InvalidMessageError."""
    import base64

    import orjson

    from commitmq.client.message import Message

    value: Any = orjson.loads(line)
    if type(value) is not dict:
        raise ValueError("a JSON line must be an object with a body")
    unknown = set(value) - _FIELDS
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}; fields are {', '.join(sorted(_FIELDS))}")
    body, encoded = value.get("body"), value.get("body_base64")
    if (body is None) == (encoded is None):
        raise ValueError("a JSON line needs either body or body_base64")
    if encoded is not None:
        if type(encoded) is not str:
            raise ValueError("body_base64 must be a string")
        content = base64.b64decode(encoded, validate=True)
    else:
        if type(body) is not str:
            raise ValueError("body must be a string (body_base64 for bytes)")
        content = body.encode()
    properties = value.get("properties")
    if properties is not None and type(properties) is not dict:
        raise ValueError("properties must be an object of strings")
    return Message(
        content,
        tags=value.get("tags"),
        keys=value.get("keys"),
        properties=properties,
        sharding_key=value.get("sharding_key"),
        flag=value.get("flag", 0),
    )


@contextmanager
def _bar(path: Path | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, fed with bytes read; without a terminal nothing."""
    if not sys.stderr.isatty() or (path is None and sys.stdin.isatty()):
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
