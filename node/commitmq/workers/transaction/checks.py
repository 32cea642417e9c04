"""The check service: asks about transactions without an end, round for round (spec 12.3).

A round is cut into steps, so that ends do not wait for it. A half message that a step puts back or gives up is appended
before the position passes it. If something dies in between, the copy is found when the process resumes.

A half message whose copy the node refuses permanently (too many bytes for a limit that was lowered) holds up no other:
the positions wait before it, and its producer is asked at the place where it is, each round. After ``check_max`` of
them it is given up as it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from commitmq.config.schema import TransactionConfig
from commitmq.coordination import requests
from commitmq.coordination.groups import check_name
from commitmq.errors import ProtocolError
from commitmq.format.record import Record
from commitmq.network.router import Router
from commitmq.security.native_rights import FIELD
from commitmq.semantics.transaction import (
    HALF_TOPIC,
    OP_TOPIC,
    OPS_AT_ONCE,
    ROLLBACK,
    CheckDecision,
    CheckRound,
    CheckRules,
    CheckStep,
    discarded_record,
    op_offsets,
)
from commitmq.workers.transaction.ends import (
    MOST_BYTES,
    Append,
    Appends,
    Ends,
    HalfPosition,
    HalfQueues,
    TransactionTable,
)

Ask = Callable[[Record, HalfPosition], None]
"""Asks a producer about a half message at its place."""
Report = Callable[[Record, str], None]
"""Told of a half message whose copy is refused permanently, and why."""

_READ: Final = 64
_MOST_LOOKS: Final = 2_048  # at half messages in a step, which requests wait for
_OPS_A_STEP: Final = 256


class CheckService:
    """The rounds. ``transactions`` is set by the owner when it has resumed."""

    transactions: TransactionTable

    def __init__(
        self,
        queues: HalfQueues,
        appends: Appends,
        ends: Ends,
        rules: CheckRules,
        batch: int,
        ask: Ask,
        report: Report,
    ) -> None:
        """``batch``: half messages that are put back together."""
        self._queues, self._appends, self._ends = queues, appends, ends
        self._rules, self._batch, self._ask, self._report = rules, batch, ask, report
        self._round: CheckRound | None = None
        self._halves_are_done = False
        self._cached: dict[int, Record] = {}
        self._stuck: dict[int, int] = {}
        """Offsets of open half messages that cannot be put back, and how often each was asked about."""
        self.checked = self.discarded = 0

    @property
    def is_running(self) -> bool:
        """Whether a round has begun and has more to do."""
        return self._round is not None

    def forget(self) -> None:
        """The round ends where it is: what it has done is to be found again."""
        self._round = None
        self._halves_are_done = False
        self._cached.clear()

    def has_work(self) -> bool:
        """Whether any half message or op message is behind the positions."""
        transactions = self.transactions
        return (
            transactions.half_offset < self._queues.bounds(HALF_TOPIC)[1]
            or transactions.op_offset < self._queues.bounds(OP_TOPIC)[1]
        )

    def begin(self, now_ms: int) -> None:
        transactions = self.transactions
        low, high = self._queues.bounds(HALF_TOPIC)
        ops_low, ops_high = self._queues.bounds(OP_TOPIC)
        transactions.pass_to(
            min(max(transactions.half_offset, low), high), min(max(transactions.op_offset, ops_low), ops_high)
        )
        self._round = CheckRound(
            transactions.half_offset,
            transactions.op_offset,
            now_ms,
            self._rules,
            decided=transactions.decided_before,
            end_offset=high,
        )
        self._cached.clear()
        self._take_ops(self._round)

    def step(self, now_ms: int, proven_ms: int | None = None) -> None:
        """Carry the round on by one batch. ``proven_ms``: see :meth:`CheckRound.decide`. Raises WriterLost."""
        round_ = self._round
        assert round_ is not None
        if self._halves_are_done:
            if not self._pass_ops():
                self.forget()
            return
        taken: list[tuple[CheckDecision, Record]] = []
        goes_on = True
        looks = size = 0
        while goes_on and len(taken) < self._batch and looks < _MOST_LOOKS and size < MOST_BYTES:
            before = len(taken)
            goes_on = not round_.is_over(now_ms) and self._look(round_, now_ms, proven_ms, taken)
            looks += 1
            size += len(taken[-1][1].body) if len(taken) > before else 0
        if not self._append(taken, now_ms):
            self.forget()  # the writer takes nothing at the moment: another round tries again
            return
        self._pass_to(round_)
        self._halves_are_done = not goes_on

    def _look(
        self, round_: CheckRound, now_ms: int, proven_ms: int | None, taken: list[tuple[CheckDecision, Record]]
    ) -> bool:
        """Decide about one half message. False when the round is over."""
        offset = round_.next_undecided()
        if not self.transactions.is_open(offset):
            if offset >= self._queues.bounds(HALF_TOPIC)[1]:
                return False
            round_.passed()
            return True
        half = self._half(round_, offset)
        if half is None:
            return round_.half_offset != offset
        place = HalfPosition(offset, half.physical_offset)
        if self._ends.is_gone(half, place):
            self.transactions.note_end(half, place, int(ROLLBACK))
            round_.passed()
            return True
        decision = round_.decide(half, now_ms, proven_ms)
        if decision.step is CheckStep.STOP:
            return False
        if decision.step is CheckStep.MORE_OPS:
            self._take_ops(round_)
            return True
        if decision.record is not None:
            taken.append((decision, half))
        round_.passed()
        return True

    def _half(self, round_: CheckRound, offset: int) -> Record | None:
        """The half message at ``offset``. None at the queue's end, and where none can be read: then the round skips."""
        if offset not in self._cached:
            behind, records = self._queues.records(HALF_TOPIC, offset, _READ)
            self._cached = {record.queue_offset: record for record in records}
            if offset not in self._cached and behind > offset:
                round_.skip_to(min([*self._cached, behind]))
        return self._cached.get(offset)

    def _take_ops(self, round_: CheckRound) -> None:
        behind, ops = self._queues.records(OP_TOPIC, round_.next_op_offset, OPS_AT_ONCE)
        round_.take_ops(ops)
        if not ops and behind > round_.next_op_offset:
            round_.next_op_offset = behind  # units whose records are gone

    def _pass_ops(self) -> bool:
        """Pass the next op messages whose half messages are all passed. True when there may be more of them.

        The round itself takes op messages only where it has to decide. So without this the position would stay behind
        when most transactions have ended before they are looked at, and a start would read all op messages again.
        """
        transactions = self.transactions
        reached, ops = self._queues.records(OP_TOPIC, transactions.op_offset, _OPS_A_STEP)
        open_ones = (
            op.queue_offset for op in ops if any(offset >= transactions.half_offset for offset in op_offsets(op))
        )
        passed = next(open_ones, reached)
        may_have_more = passed == reached > transactions.op_offset
        transactions.pass_to(transactions.half_offset, passed)
        return may_have_more

    def _pass_to(self, round_: CheckRound) -> None:
        """Move the positions as far as the round is, but not past a half message that is stuck."""
        self._stuck = {offset: times for offset, times in self._stuck.items() if self.transactions.is_open(offset)}
        half_offset = min([round_.half_offset, *self._stuck])
        # The op messages from here on say which half messages behind a stuck one have ended.
        op_offset = self.transactions.op_offset if self._stuck else round_.new_op_offset()
        self.transactions.pass_to(half_offset, op_offset)

    def _append(self, taken: list[tuple[CheckDecision, Record]], now_ms: int) -> bool:
        """Carry out the decisions of a step. False when some may be carried out later. Raises WriterLost."""
        if not taken:
            return True
        appends = [Append(decision.record) for decision, _ in taken if decision.record is not None]
        self._appends.put("renewal", appends)
        for (decision, half), append in zip(taken, appends, strict=True):
            if append.place is None:
                if not append.retry:
                    self._refused(decision, half, append)
                continue
            is_given_up = decision.step is CheckStep.DISCARD
            self.transactions.note_passed(half.queue_offset, half, None if is_given_up else append.place)
            if is_given_up:
                self.discarded += 1
            elif decision.step is CheckStep.CHECK:
                self.checked += 1
                self._ask(append.record, append.place)
        return all(append.place is not None or not append.retry for append in appends)

    def _refused(self, decision: CheckDecision, half: Record, append: Append) -> None:
        """The copy of ``half`` is refused permanently. Raises WriterLost."""
        offset = half.queue_offset
        times = self._stuck.get(offset, 0) + (decision.step is CheckStep.CHECK)
        if decision.step is not CheckStep.DISCARD and times <= self._rules.check_max:
            if offset not in self._stuck:
                self._report(half, f"it cannot be put back: {append.sentence}")
            self._stuck[offset] = times
            if decision.step is CheckStep.CHECK:
                self.checked += 1
                self._ask(half, HalfPosition(offset, half.physical_offset))
            return
        if decision.step is not CheckStep.DISCARD:
            append = Append(discarded_record(half))
            self._appends.put("renewal", [append])
            if append.place is None and append.retry:
                return  # the next round tries again
        if append.place is None:
            self._report(half, f"it is given up, and has no copy: {append.sentence}")
        self.transactions.note_passed(offset, half, None)
        self.discarded += 1


NOBODY_TO_ASK: Final = (
    "no producer of the group can be asked about its transactions; they are given up after check_max rounds"
)
_MOST_UNHEARD: Final = 1_000
_MOST_SHOWN: Final = 10


class UnheardGroups:
    """Groups with open transactions and no producer to ask, so that people are told once of each."""

    def __init__(self) -> None:
        self._groups: set[str] = set()

    @property
    def shown(self) -> list[str]:
        """Some of them, for ``status``."""
        return sorted(self._groups)[:_MOST_SHOWN]

    def note(self, group: str) -> bool:
        """True when ``group`` is a new one."""
        if group in self._groups or len(self._groups) >= _MOST_UNHEARD:
            return False
        self._groups.add(group)
        return True

    def forget(self, group: str | None = None) -> bool:
        """A producer of ``group`` was asked; None: no transaction is open any more. True when that changes anything."""
        gone = set(self._groups) if group is None else self._groups & {group}
        self._groups -= gone
        return bool(gone)


class Registrant(NamedTuple):
    """Who has registered. ``user``: whose right to the messages is asked for; empty for the node's own account, and on a node
    without users. ``address``: from where; None where a gateway speaks for the user, which looks at the addresses itself.
    """

    peer: bytes
    user: str = ""
    address: str | None = None


def groups_of(header: dict[str, Any]) -> list[str]:
    """The groups that a request registers. Raises ProtocolError."""
    groups = requests.names(header, "groups") if "groups" in header else [requests.text(header, "group")]
    for group in groups:
        check_name(group)
    return groups


def registrant_of(router: Router, peer: bytes, header: dict[str, Any]) -> Registrant:
    """Who has sent the request that ``router`` just gave."""
    user = router.user_of(header) or ""
    return Registrant(peer, user, None if FIELD in header else router.actor(peer, header).address)


def may_be_asked(router: Router, who: Registrant, topic: str) -> bool:
    """Whether ``who`` is still connected, reads its answers, and may see a half message of ``topic``."""
    guard = router.guard
    if router.gate.has_left(who.peer) or router.unsent.is_over(who.peer):
        return False
    return guard is None or guard.may_send(who.user, who.address, topic)


class ProducerManager:
    """The live producers of each group, which can be asked about a transaction, and for which user each of them is.

    A check shows a half message. So on a node with users it goes to producers alone whose user may send to the message's
    topic.

    Registrants by group. Each registers again and again; one that does not for ``timeout_ms`` is forgotten.

    A gateway of the node registers the groups of all its clients over one connection, those of each user for itself. A user
    has at most ``most_of_user`` of the ``most`` places, so that nobody's groups crowd out those of all others.
    """

    def __init__(self, *, timeout_ms: int, most: int, most_of_user: int) -> None:
        self.timeout_ms = timeout_ms
        self._most, self._most_of_user = most, most_of_user
        self._until: dict[tuple[Registrant, str], int] = {}
        self._turns: dict[str, deque[Registrant]] = {}
        """Whom to ask next in a group. It may name producers that have gone."""
        self._of_users: Counter[str] = Counter()

    @classmethod
    def of(cls, config: TransactionConfig) -> ProducerManager:
        """With the bounds of the settings."""
        most, most_of_user = config.max_producers, config.max_producers_per_user
        return cls(timeout_ms=config.session_timeout_ms, most=most, most_of_user=most_of_user)

    def __len__(self) -> int:
        return len(self._until)

    def register(self, who: Registrant, groups: Iterable[str], now_ms: int) -> None:
        """``who`` is a live producer of ``groups``. Raises ProtocolError SYSTEM_BUSY for those that have no place; the others
        are registered all the same.
        """
        refused: ProtocolError | None = None
        for group in groups:
            if (who, group) not in self._until:
                if (why := self._is_full(who.user)) and refused is None and self.expire(now_ms):
                    why = self._is_full(who.user)
                if why:
                    refused = ProtocolError("SYSTEM_BUSY", why, retry_after_ms=self.timeout_ms)
                    continue
                self._turns.setdefault(group, deque()).append(who)
                self._of_users[who.user] += 1
            self._until[who, group] = now_ms + self.timeout_ms
        if refused is not None:
            raise refused

    def _is_full(self, user: str) -> str:
        """Why no producer of ``user`` has a place; empty when one has."""
        if len(self._until) >= self._most:
            return f"{self._most} producers are registered (transaction.max_producers)"
        if user and self._of_users[user] >= self._most_of_user:
            return f"{self._most_of_user} producers of user {user} are registered (transaction.max_producers_per_user)"
        return ""

    def leave(self, peer: bytes, group: str | None = None) -> None:
        """``peer`` is asked no more for ``group``; without one, for none of its groups."""
        if group is None:
            left = [key for key in self._until if key[0].peer == peer]
        else:
            left = [(who, group) for who in self._turns.get(group, ()) if who.peer == peer]
        for who, one in left:
            self._forget(who, one)

    def _forget(self, who: Registrant, group: str) -> None:
        del self._until[who, group]
        self._of_users[who.user] -= 1
        if not self._of_users[who.user]:
            del self._of_users[who.user]
        turn = self._turns[group]
        turn.remove(who)
        if not turn:
            del self._turns[group]

    def expire(self, now_ms: int) -> bool:
        """Forget those that did not register again. Whether there were any."""
        gone = [key for key, until_ms in self._until.items() if until_ms <= now_ms]
        for who, group in gone:
            self._forget(who, group)
        return bool(gone)

    def pick(self, group: str, now_ms: int, can_take: Callable[[Registrant], bool]) -> bytes | None:
        """The routing id of a live producer of ``group``, each in its turn; None when there is none. ``can_take``: it is still
        connected, and may see the message.
        """
        turn = self._turns.get(group)
        for _ in range(len(turn or ())):
            assert turn is not None
            who = turn[0]
            turn.rotate(-1)
            if self._until[who, group] > now_ms and can_take(who):
                return who.peer
        return None
