"""The operations on committed offsets: ``offset.commit``, ``offset.fetch`` and ``offset.forget``."""

from __future__ import annotations

from commitmq.coordination import requests
from commitmq.coordination.answers import Answer, Operations
from commitmq.coordination.group_settings import check_name
from commitmq.coordination.groups import Groups
from commitmq.coordination.offsets import GroupOffsets
from commitmq.coordination.queue_ends import QueueEnds
from commitmq.coordination.requests import Header
from commitmq.coordination.resets import begin_anew
from commitmq.coordination.share_operations import ShareOperations
from commitmq.coordination.topics import Topics
from commitmq.errors import ProtocolError

_MAX_GENERATION = (1 << 63) - 1


class OffsetOperations:
    """See the module; :attr:`operations` has them by name."""

    def __init__(
        self, offsets: GroupOffsets, groups: Groups, topics: Topics, ends: QueueEnds, shares: ShareOperations
    ) -> None:
        self._offsets, self._groups, self._topics, self._ends, self._shares = offsets, groups, topics, ends, shares
        self.operations: Operations = {
            "offset.commit": self._commit,
            "offset.fetch": self._fetch,
            "offset.forget": self._forget,
        }

    def _commit(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.optional_text(header, "member")
        generation = requests.optional_integer(header, "generation", 0, _MAX_GENERATION)
        offsets = requests.offsets(header, "offsets")
        reset, begin, partial_ = (requests.flag(header, name) for name in ("reset", "begin", "partial"))
        anew = requests.flag(header, "running") and reset and member is None
        incarnations = requests.incarnations(header, "incarnations")
        known = requests.known_offsets(header, "known", len(offsets))
        generations = requests.known_offsets(header, "log_generations", len(offsets))
        heard = requests.optional_integer(header, "heard", 0, _MAX_GENERATION)
        self._groups.check_member(group, member, requests.optional_text(header, "instance") or "")
        wanted: list[tuple[str, int, int]] = []
        refused: list[tuple[str, int, str, str]] = []
        # All entries are checked before any is staged: a commit happens as a whole or not at all, except with
        # ``partial``.
        for number, (topic, queue, offset) in enumerate(offsets):
            try:
                # A commit for a deleted topic says nothing about the next topic of the same name.
                self._topics.check_incarnation(topic, incarnations.get(topic))
                self._topics.check_queue(topic, queue)
                if not anew and (not begin or member is None):  # any member may set where the group begins
                    self._groups.check_owner(group, member, (topic, queue), generation)
                self._shares.check_heard(group, (topic, queue), heard)
                if known is not None:
                    self._check_known(group, topic, queue, known[number])
            except ProtocolError as error:
                if not partial_ or error.code == "UNKNOWN_MEMBER":
                    raise
                refused.append((topic, queue, error.code, error.message))
                continue
            learnt = -1 if generations is None else generations[number]
            wanted.append((topic, queue, self._within(topic, queue, offset, learnt)))
        self._groups.use(group, consuming=False)
        # Offsets may go back in three cases: when a reset asks for it; in memory topics, which begin again with the
        # node, so that a consumer that lived on is right; and when the committed offset lies behind the queue's end.
        free = [one for one in wanted if reset or self._topics.is_memory(one[0]) or self._is_ahead(group, *one[:2])]
        stored = self._offsets.stage(group, wanted, lower=[one[:2] for one in free], only_new=begin)
        if anew and (membership := self._groups.membership(group)) is not None:
            for topic, queue, _ in wanted:
                begin_anew(membership, (topic, queue))
        # (Commits with ``partial`` are those of one client that goes on, if none asks for its members too.)
        if anew or (reset and member is None and not partial_):
            self._shares.note_resets(group, [one[:2] for one in wanted], now_ms)
        return Answer(lambda: {"stored": stored, **({"refused": refused} if partial_ else {})}, "offsets")

    def _check_known(self, group: str, topic: str, queue: int, known: int) -> None:
        """Raise FENCED when the group's offset lies below the one that the member knew: a person has reset it since,
        and messages that the member read after that must not undo the reset.
        """
        stored = self._offsets.staged_offset(group, topic, queue)
        if stored < known and not self._topics.is_memory(topic):
            raise ProtocolError(
                "FENCED",
                f"queue {queue} of topic {topic} in group {group}: its offset was reset from {known} to {max(stored, 0)}",
            )

    def _within(self, name: str, queue: int, offset: int, generation: int = -1) -> int:
        """``offset``, or the queue's end when ``offset`` lies behind it: its end now, and at the cuts of the log since
        ``generation``, in which the offset was learnt; -1 when that is not known.
        """
        topic = self._topics.get(name)
        if generation >= 0 and (cut := self._ends.end_since(topic, queue, generation)) is not None:
            offset = min(offset, cut)
        end = self._ends.end(topic, queue, offset, self._topics.deletions.tombstones.get(name, 0))
        return offset if end is None else min(offset, end)

    def _is_ahead(self, group: str, topic: str, queue: int) -> bool:
        """Whether the committed offset lies behind the queue's end."""
        stored = self._offsets.staged_offset(group, topic, queue)
        return stored > 0 and self._within(topic, queue, stored) < stored

    def _fetch(self, header: Header, now_ms: int) -> Answer:
        group = requests.text(header, "group")
        check_name(group)
        queues = requests.queues(header, "queues")
        generation = self._ends.cuts.generation
        # Read after the turn's sync: a client that sends a commit and a fetch without waiting gets the committed
        # offset.
        return Answer(
            lambda: {
                "offsets": [(topic, queue, self._offsets.fetch(group, topic, queue)) for topic, queue in queues],
                "incarnations": self._topics.incarnations({topic for topic, _ in queues}),
                "log_generation": generation,
            }
        )

    def _forget(self, header: Header, now_ms: int) -> Answer:
        """An administrator deletes the group with its offsets."""
        group = requests.text(header, "group")
        check_name(group)
        self._offsets.stage_forget(group)
        return Answer(dict, "offsets")
