"""The methods of an administrator's client for the dead letters of a group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from commitmq.client.admin_results import GroupOffset, TopicInfo
from commitmq.errors import ProtocolError, TopicNotFoundError
from commitmq.format.constants import DEAD_LETTER_PASSES, DLQ_PREFIX

if TYPE_CHECKING:
    import zmq

    from commitmq.client.dead_letter_resend import Progress, ResendResult
    from commitmq.client.dead_letters import DeadLetter, DeadLetterFilter, DeadLetters, Resent

_PAUSE_S = 0.02
_INDEX_S = 10.0


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """``purged``: dead letters that were given up (with ``dry_run``: would be). ``positions``: where a resend begins."""

    group: str
    dry_run: bool
    purged: int
    positions: list[GroupOffset] = field(default_factory=list)


class DeadLetterCount(NamedTuple):
    """``dead``: the dead letters of ``group`` that a resend would look at. Those that a filtered resend took out are in it."""

    group: str
    dead: int


class DeadLetterAdmin:
    """A part of :class:`commitmq.Admin`."""

    def dlq_groups(self, *, after: str = "", max_groups: int = 200) -> tuple[list[DeadLetterCount], str | None]:
        """The groups with dead letters, by name, and where the next call continues (``after``), else None.

        A call looks at ``max_groups`` dead-letter topics, with two requests each.
        """
        if max_groups < 1:
            raise ValueError("max_groups must be at least 1")
        topics = [one.name for one in self.topics() if one.name.startswith(DLQ_PREFIX)]
        names = sorted(name for topic in topics if (name := topic.removeprefix(DLQ_PREFIX)) > after)
        found = []
        for name in names[:max_groups]:
            try:
                letters = self._dead_letters(name)
            except TopicNotFoundError:
                continue  # it was deleted meanwhile
            positions = letters.positions()
            if dead := sum(max(end - positions[queue], 0) for queue, end in letters.ends.items()):
                found.append(DeadLetterCount(name, dead))
        return found, names[max_groups - 1] if len(names) > max_groups else None

    def dlq_list(
        self,
        group: str,
        selected: DeadLetterFilter | None = None,
        *,
        max_messages: int = 64,
        all_states: bool = False,
    ) -> list[DeadLetter]:
        """The oldest dead letters of ``group``, at most ``max_messages``: those that a resend would send.

        ``all_states``: also those that were resent or purged. Raises TopicNotFoundError when the group never had one.
        """
        wanted = _filter(selected)
        if max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        letters = self._dead_letters(group)
        resent = self._resent()
        found: list[DeadLetter] = []
        for queue, position in letters.positions().items():
            for page in letters.pages(queue, letters.begins[queue] if all_states else position):
                for letter in page.letters:
                    if len(found) == max_messages:
                        return found
                    if wanted.matches(letter):
                        letter = self._with_state(letter, position, resent)
                        if all_states or letter.state == "dead":
                            found.append(letter)
        return found

    def dlq_show(self, group: str, offset: int, *, queue: int = 0) -> DeadLetter:
        """One dead letter of ``group`` by its queue offset. Raises ProtocolError when there is none."""
        letters = self._dead_letters(group)
        return self._with_state(letters.at(queue, offset), letters.positions()[queue], self._resent())

    def dlq_resend(
        self,
        group: str,
        selected: DeadLetterFilter | None = None,
        *,
        rate: float = 500.0,
        max_messages: int | None = None,
        dry_run: bool = False,
        timeout_s: float = 30.0,
        on_progress: Progress | None = None,
    ) -> ResendResult:
        """Send the dead letters of ``group`` to their original topics again, each once, at most ``rate`` a second.

        An interrupted call can be repeated: it leaves out what was resent already. ``max_messages`` ends the call after
        so many. With ``dry_run`` it only counts. ``timeout_s`` bounds the wait for one message that the node cannot take now.
        ``on_progress`` is called with the number of dead letters that were looked at, and with how many there are.
        """
        from commitmq.client.dead_letter_resend import ResendPass

        if not 0 < rate <= 1_000_000:
            raise ValueError(f"rate must be between 0 and 1,000,000 messages a second, not {rate}")
        if max_messages is not None and max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        return ResendPass(
            self._request,
            self._dead_letters(group),
            _filter(selected),
            rate=rate,
            max_messages=max_messages,
            dry_run=dry_run,
            timeout_s=timeout_s,
            on_progress=on_progress,
        ).run()

    def dlq_purge(self, group: str, *, until: int | datetime | None = None, dry_run: bool = False) -> PurgeResult:
        """Give up the dead letters of ``group``: a resend begins behind them. ``until`` spares those that died later.

        The messages stay in the log until they expire, and the dead-letter topic can still be read. A second call does
        nothing. Dead letters that were resent are not counted, as far as the index can tell.
        """
        from commitmq.client.receiving.query import milliseconds

        letters = self._dead_letters(group)
        positions = letters.positions()
        targets = dict(letters.ends)
        if until is not None:
            fields = {"topic": letters.topic, "timestamp": (milliseconds(until) or 0) + 1}
            answer, _ = self._request("reader", "offsets", fields)
            by_time = {int(row[0]): row[1] if row[3] is None else row[3] for row in answer["queues"]}
            targets = {queue: min(by_time.get(queue, end), end) for queue, end in targets.items()}
        moves = {queue: at for queue, at in targets.items() if at > positions[queue]}
        purged = self._not_resent(letters, {queue: (positions[queue], at) for queue, at in moves.items()})
        if moves and not dry_run:
            letters.move(moves, purges=True)
        reached = positions | moves
        return PurgeResult(
            group,
            dry_run,
            purged,
            [GroupOffset(letters.topic, queue, at) for queue, at in (positions if dry_run else reached).items()],
        )

    def _not_resent(self, letters: DeadLetters, parts: dict[int, tuple[int, int]]) -> int:
        """How many dead letters of these parts of queues were not resent; all, where no resend began or no index tells."""
        whole = sum(end - first for first, end in parts.values())
        resent = self._resent()
        count = 0
        try:
            self._request("reader", "offsets", {"topic": DEAD_LETTER_PASSES})
            for queue, (first, end) in parts.items():
                for page in letters.pages(queue, first):
                    mine = [one for one in page.letters if one.message.queue_offset < end]
                    count += sum(not resent.has(one) for one in mine)
                    if page.next_offset >= end:
                        break
        except TopicNotFoundError:
            return whole
        except ProtocolError as error:
            if error.code != "SERVICE_NOT_AVAILABLE":
                raise
            return whole
        return count

    def _dead_letters(self, group: str) -> DeadLetters:
        from commitmq.client.dead_letters import DeadLetters

        return DeadLetters(self._request, group)

    def _resent(self) -> Resent:
        from commitmq.client.dead_letters import Resent

        deadline = time.monotonic() + _INDEX_S

        def wait() -> None:
            if time.monotonic() > deadline:
                raise ProtocolError("SERVICE_NOT_AVAILABLE", f"the index is behind the log for {_INDEX_S:g} s")
            time.sleep(_PAUSE_S)

        return Resent(self._request, wait=wait)

    @staticmethod
    def _with_state(letter: DeadLetter, position: int, resent: Resent) -> DeadLetter:
        is_behind = letter.message.queue_offset < position
        if resent.has(letter, deleted=is_behind):
            return replace(letter, state="resent")
        return replace(letter, state="purged") if is_behind else letter

    def topics(self) -> list[TopicInfo]:
        raise NotImplementedError

    def _request(
        self,
        role: str,
        op: str,
        fields: dict[str, Any],
        *,
        payload: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[zmq.Frame]]:
        raise NotImplementedError


def _filter(selected: DeadLetterFilter | None) -> DeadLetterFilter:
    from commitmq.client.dead_letters import DeadLetterFilter

    return selected if selected is not None else DeadLetterFilter()
