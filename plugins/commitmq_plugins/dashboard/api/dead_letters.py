"""Dead letters: which groups have some, those of one group, and a resend of a selection with an outcome for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from commitmq.client.dead_letters import DeadLetterFilter
from commitmq.errors import ProtocolError
from commitmq.format.constants import DEAD_LETTER_GROUP, DLQ_PREFIX
from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.shell import command
from commitmq_plugins.dashboard.api.shown_message import MessageRow, row_of
from commitmq_plugins.dashboard.api.values import BadValueError, value

if TYPE_CHECKING:
    from commitmq.client.admin import Admin
    from commitmq.client.dead_letters import DeadLetter

MOST_SELECTED: Final = 100
_MOST_GROUPS: Final = 200
_MOST: Final = 100


@dataclass(frozen=True, slots=True)
class DeadGroupsAsked:
    """Which groups."""

    q: str = value("", "Only groups with this text in their name.", longest=255)
    after: str = value("", "The last group of the page before.", longest=255)


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """A group with a dead-letter topic. ``waiting``: letters behind those that are dealt with; null when not known."""

    group: str
    messages: int | None
    waiting: int | None
    oldest_s: float | None


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """A page of groups by name."""

    groups: list[DeadGroup]
    next: str | None


@dataclass(frozen=True, slots=True)
class DeadLettersAsked:
    """Dead letters of a group, the oldest first."""

    group: str = value(doc="The group's name.", longest=255)
    all: bool = value(False, "Also those that were resent or purged.")
    topic: str | None = value(None, "Only those that came from this topic.", longest=255)
    key: str | None = value(None, "Only messages with this key.", longest=255)
    limit: int = value(50, "Rows.", low=1, high=_MOST)


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter. ``state``: dead, resent, or purged."""

    offset: int
    state: str
    origin_topic: str | None
    message: MessageRow


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters of a group. ``more``: there may be others behind these."""

    group: str
    letters: list[DeadLetterRow]
    more: bool


@dataclass(frozen=True, slots=True)
class ResendWanted:
    """A selection to send to their original topics again, each once."""

    group: str = value(doc="The group's name.", longest=255)
    offsets: tuple[int, ...] = value(doc="Queue offsets of the dead letters, 100 at most.", longest=MOST_SELECTED)
    confirm: str = value(doc="The group's name, typed.", longest=255)


@dataclass(frozen=True, slots=True)
class ResendOutcome:
    """One dead letter: resent (now), resent before, purged, not there, or failed with the reason."""

    offset: int
    outcome: str
    topic: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Resend:
    """One outcome for each letter that was selected."""

    group: str
    sent: int
    outcomes: list[ResendOutcome]
    command: str


def dead_groups(node: Node, asked: DeadGroupsAsked) -> DeadGroups:
    """No request of its own: the shared figures have the topics and what is dealt with."""
    figures, topics = node.figures(), node.topics()
    text = asked.q.lower()
    names = sorted(name.removeprefix(DLQ_PREFIX) for name in topics if name.startswith(DLQ_PREFIX))
    names = [name for name in names if text in name.lower() and name > asked.after]
    rows = []
    for name in names[:_MOST_GROUPS]:
        topic = DLQ_PREFIX + name
        bounds = node.bounds([(topic, queue) for queue in range(int(topics[topic]["read_queues"]))][:16])
        messages = None if None in bounds else sum(end - begin for begin, end in filter(None, bounds))
        lag = figures.group_lags.get((DEAD_LETTER_GROUP, topic))
        waiting = messages if lag is None else lag.messages
        since = None if lag is None else lag.since_ms
        age = None if since is None else round(max(0, figures.at_ms - since) / 1000, 1)
        rows.append(DeadGroup(name, messages, waiting, age))
    return DeadGroups(rows, names[_MOST_GROUPS - 1] if len(names) > _MOST_GROUPS else None)


def dead_letters(node: Node, asked: DeadLettersAsked) -> DeadLetters:
    """A request of the index for each letter: that tells which were resent."""
    selected = DeadLetterFilter(topic=asked.topic, key=asked.key)
    found = node.admin.dlq_list(asked.group, selected, max_messages=asked.limit, all_states=asked.all)
    return DeadLetters(asked.group, [_row(one) for one in found], len(found) == asked.limit)


def _row(letter: DeadLetter) -> DeadLetterRow:
    message = letter.message
    # Where it lies, not where it came from: the page of the message finds it by its id.
    return DeadLetterRow(message.queue_offset, letter.state, letter.topic, replace(row_of(message)))


def resend(node: Node, asked: ResendWanted) -> Resend:
    """Send the selected letters again. A repeated request stores nothing twice, whatever became of the first."""
    if asked.confirm != asked.group:
        raise BadValueError("confirm is the group's name: type it to say that you mean this group")
    offsets = list(dict.fromkeys(asked.offsets))
    if not offsets:
        raise BadValueError("no dead letter is selected")
    outcomes = {}
    with node.new_admin(node.settings.resend_ms / 1000) as admin:
        before = {offset: _look(admin, asked.group, offset) for offset in offsets}
        dead = [offset for offset, letter in before.items() if letter is not None and letter.state == "dead"]
        failures: dict[int, str] = {}
        if dead:
            result = admin.dlq_resend(
                asked.group,
                DeadLetterFilter(offsets=dead),
                max_messages=len(dead),
                timeout_s=node.settings.resend_ms / 1000,
            )
            failures = {one.offset: one.reason for one in result.failures}
        for offset, letter in before.items():
            after = _look(admin, asked.group, offset) if offset in dead else letter
            outcomes[offset] = _outcome(offset, letter, after, failures.get(offset))
    words = [word for offset in offsets for word in ("--offset", str(offset))]
    sent = sum(one.outcome == "resent" for one in outcomes.values())
    return Resend(asked.group, sent, list(outcomes.values()), command("dlq", "resend", asked.group, *words))


def _look(admin: Admin, group: str, offset: int) -> DeadLetter | None:
    try:
        return admin.dlq_show(group, offset)
    except ProtocolError as error:
        if error.code != "INVALID_PARAMETER":
            raise
        return None


def _outcome(offset: int, before: DeadLetter | None, after: DeadLetter | None, failure: str | None) -> ResendOutcome:
    if before is None:
        return ResendOutcome(offset, "not there", None, "it expired, or never was")
    if before.state != "dead":
        return ResendOutcome(offset, "resent before" if before.state == "resent" else before.state, before.topic, None)
    if after is not None and after.state == "resent":
        return ResendOutcome(offset, "resent", before.topic, None)
    return ResendOutcome(offset, "failed", before.topic, failure or "it was not reached; try again")
