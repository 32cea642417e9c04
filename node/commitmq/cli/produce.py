"""``commitmq produce TOPIC``: sends lines or JSON lines from a file or standard input as messages.

The lines that ``commitmq produce`` reads from a file or a pipe, until the input or the command ends.

The sender of ``commitmq produce``: messages of numbered lines, in batches, with a count of the stored ones.

Messages of the lines that ``commitmq produce`` reads: a line is a body, or a JSON object.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from commitmq.cli.options import json_option, node_option
from commitmq.cli.output import BYTE_COLUMNS, can_draw, complain, drawn_bars, fail, print_json
from commitmq.cli.quantity import MAX_INT, seconds
from commitmq.errors import CommitMQError, ConfigError, InvalidMessageError

if TYPE_CHECKING:
    from commitmq.client.message import Message
    from commitmq.client.producer import Producer


LINE_HELD_S: Final = 0.05
"""A line waits at most this long for others of its batch."""
_READ_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 64 * 1024 * 1024
_DRAINED_BYTES: Final = 1 << 20  # read at most this much from a pipe after the command was told to end


class BadLineError(Exception):
    """The line with this number is no message."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason


class UnreadableError(Exception):
    """Reading the input failed with a system error."""


class StopSignals:
    """Notes Ctrl-C and SIGTERM while it is entered, so that the command can send the lines that it has read. The second
    signal raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.left_out = False
        """Whether an incomplete line was dropped."""
        self._stack = ExitStack()

    def __enter__(self) -> StopSignals:
        self.fd, wake = os.pipe()
        os.set_blocking(wake, False)
        self._stack.callback(os.close, self.fd)
        self._stack.callback(os.close, wake)
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._stack.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _note(self, number: int, _frame: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


def input_lines(fd: int, advance: Callable[[int], None], ending: StopSignals) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without their ends; (number, None) after each look for more input, at least every 50 ms at first.

    ``advance(count)`` is called for the bytes of each read. Raises BadLineError and UnreadableError.
    """
    rest = b""
    number = 0
    is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    longest: float | None = LINE_HELD_S
    drained = 0
    while True:
        is_ending = ending.signal is not None
        if not is_ending:
            ready = select.select([fd, ending.fd], [], [], longest)[0]
        else:
            # Read no more of a file, and of a pipe only the bytes that are there.
            ready = [] if is_file or drained >= _DRAINED_BYTES else select.select([fd], [], [], 0)[0]
        if fd not in ready:
            yield number, None
            if is_ending:
                ending.left_out = bool(rest)
                return
            # After twice the time without input the consumer of the lines has sent every held line. (The signal may
            # have come after this look: the input that came before the signal needs one more look.)
            longest = None if longest is None or not ready else longest
            continue
        longest = LINE_HELD_S
        try:
            data = os.read(fd, _READ_BYTES)
        except OSError as error:
            raise UnreadableError("it is closed" if error.errno == errno.EBADF else error.strerror) from error
        if ending.signal is not None:
            drained += len(data)
        advance(len(data))
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            number += 1
            yield number, line.removesuffix(b"\r")
        yield number, None
        if len(rest) > _MAX_LINE_BYTES:
            raise BadLineError(number + 1, f"it is longer than {_MAX_LINE_BYTES} bytes")
    if rest:
        yield number + 1, rest


NumberedMessage = tuple[int, "Message | bytes"]
"""The number of a line, and its message."""


class LineSender:
    """Sends lines to a topic, and knows how far it got."""

    def __init__(self, topic: str, queue: int | None, batch: int, parse: Callable[[bytes], Message | bytes]) -> None:
        """``batch``: the number of messages in a full batch. ``parse`` makes the message of a line; it raises ValueError
        or CommitMQError.
        """
        self.stored = 0
        """The number of stored messages."""
        self.last_line = 0
        """The number of the last stored line."""
        self.empty = 0
        """The number of empty lines, which are omitted."""
        self._topic = topic
        self._queue = queue
        self._batch = batch
        self._parse = parse

    def send_all(self, producer: Producer, lines: Iterator[tuple[int, bytes | None]]) -> None:
        """Send full batches. Send a partial one when its first line has waited long enough, and when the input ends or
        has a bad line. A line that is None means that the input pauses.

        Raises BadLineError and UnreadableError after all lines before it were sent, or the error of a send.
        """
        waiting: list[NumberedMessage] = []
        since = 0.0
        try:
            for one in self._messages(lines):
                if one is not None:
                    if not waiting:
                        since = time.monotonic()
                    waiting.append(one)
                is_due = one is None and time.monotonic() - since >= LINE_HELD_S
                if waiting and (len(waiting) >= self._batch or is_due):
                    self._send(producer, waiting)
                    waiting = []
        except (BadLineError, UnreadableError):
            if waiting:
                self._send(producer, waiting)
            raise
        if waiting:
            self._send(producer, waiting)

    def _messages(self, lines: Iterator[tuple[int, bytes | None]]) -> Iterator[NumberedMessage | None]:
        """Each line's number and message; None after each look for more input."""
        for number, line in lines:
            if line is None:
                yield None
            elif not line:
                self.empty += 1
            else:
                try:
                    yield number, self._parse(line)
                except (ValueError, CommitMQError) as error:
                    raise BadLineError(number, str(error)) from error

    def _send(self, producer: Producer, batch: list[NumberedMessage]) -> None:
        from commitmq.client.results import BatchSendError

        try:
            producer.send_batch(self._topic, [message for _, message in batch], queue=self._queue)
        except BatchSendError as error:
            self.stored += error.stored
            if error.stored_prefix:
                self.last_line = batch[error.stored_prefix - 1][0]
            raise
        except InvalidMessageError as error:
            raise InvalidMessageError(f"lines {batch[0][0]} to {batch[-1][0]}: {error}") from error
        self.stored += len(batch)
        self.last_line = batch[-1][0]


_FIELDS: Final = {"body", "body_base64", "tags", "keys", "properties", "sharding_key", "key", "flag", "tombstone"}
# Further fields of `consume --json`: they describe the old message's place and mean nothing for the new one.
_OF_ITS_PLACE: Final = {
    "topic",
    "queue_id",
    "queue_offset",
    "physical_offset",
    "msg_id",
    "born_timestamp",
    "store_timestamp",
    "sys_flag",
    "reconsume_times",
}


def message_of_line(tags: str | None, keys: str | None, key: str | None) -> Callable[[bytes], Message | bytes]:
    """The function that makes a message of a line: the line is the body, and all messages have these tags and keys."""
    from commitmq.client.message import Message

    if tags is None and keys is None and key is None:
        return lambda line: line
    return lambda line: Message(line, tags=tags, keys=keys, key=key)


def message_of_json(line: bytes) -> Message:
    """The message in one JSON line. Raises ValueError or InvalidMessageError."""
    import orjson

    from commitmq.client.message import Message, Tombstone
    from commitmq.client.properties import user_properties

    value: Any = orjson.loads(line)
    if type(value) is not dict:
        raise ValueError("a JSON line must be an object with a body")
    if "damage" in value:
        raise ValueError(f"it is a message whose body cannot be decoded: {value['damage']}")
    properties = value.get("properties")
    if properties is not None and type(properties) is not dict:
        raise ValueError("properties must be an object of strings")
    sharding_key = value.get("sharding_key")
    if "queue_offset" in value:  # as `consume --json` writes it
        value = {name: one for name, one in value.items() if name not in _OF_ITS_PLACE}
        sharding_key = sharding_key or (properties or {}).get("__SHARDINGKEY")
        properties = user_properties(properties or {})
    unknown = set(value) - _FIELDS
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}; fields are {', '.join(sorted(_FIELDS))}")
    keys = value.get("keys")
    if keys is not None and type(keys) not in (str, list):
        raise ValueError("keys must be a string or a list of strings")
    fields: dict[str, Any] = {
        "tags": value.get("tags"),
        "keys": keys,
        "properties": properties,
        "sharding_key": sharding_key,
        "key": value.get("key"),
        "flag": value.get("flag", 0),
    }
    tombstone = value.get("tombstone", False)
    if type(tombstone) is not bool:
        raise ValueError("tombstone must be true or false")
    if tombstone:
        if value.get("body") or value.get("body_base64"):
            raise ValueError("a tombstone has no body")
        return Tombstone(**fields)
    return Message(_body_of(value), **fields)


def _body_of(value: dict[str, Any]) -> bytes:
    import base64

    body, encoded = value.get("body"), value.get("body_base64")
    if (body is None) == (encoded is None):
        raise ValueError("a JSON line needs either body or body_base64")
    if encoded is not None:
        if type(encoded) is not str:
            raise ValueError("body_base64 must be a string")
        return base64.b64decode(encoded, validate=True)
    if type(body) is not str:
        raise ValueError("body must be a string (body_base64 for bytes)")
    return body.encode()


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
        StopSignals() as ending,
    ):
        sender.send_all(producer, input_lines(source.fileno(), advance, ending))
    if ending.signal is not None:
        left_out = "; the last line was not whole and is omitted" if ending.left_out else ""
        complain(f"ended by {ending.signal.name}; {sender.stored} messages are stored{left_out}")
        raise click.Abort
    took_s = time.perf_counter() - started
    if as_json:
        print_json(
            {"topic": topic, "messages": sender.stored, "empty_lines": sender.empty, "seconds": round(took_s, 6)}
        )
        return
    left_out = f", {sender.empty} empty lines omitted" if sender.empty else ""
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
    from commitmq.client.sending import batch as batch_plan

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
    with drawn_bars(*BYTE_COLUMNS) as progress:
        task = progress.add_task("sending", total=None if path is None else path.stat().st_size)
        yield lambda count: progress.advance(task, count)
