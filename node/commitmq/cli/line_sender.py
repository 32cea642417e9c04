"""The sender of ``commitmq produce``: messages of numbered lines, in batches, with a count of the stored ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from commitmq.cli.input_lines import LINE_HELD_S, BadLineError, UnreadableError
from commitmq.errors import CommitMQError, InvalidMessageError

if TYPE_CHECKING:
    from commitmq.client.message import Message
    from commitmq.client.producer import Producer

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
        """The number of empty lines, which are left out."""
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
