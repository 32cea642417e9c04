"""Members of groups at the node's coordinator, for which this server speaks: joins, heartbeats, queues, leaves (remoting 6.1).

A consumer of RocketMQ chooses its queues itself, from the list of its group's members. For the coordinator each of them is a
member of its group, beside the node's own consumers: both have the same rule, so both come to the same result.

    * A queue that a client has to give back counts as its own until it has not pulled from it for ``_QUIET_S``.
    * Heartbeats are due at whole steps of ``_STEP_S``, and those of one step are few requests. A heartbeat repeats the queues
      of a member only when they are others. So the cost grows with what changes, and hardly with what exists.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.log import Log
from commitmq_plugins.rocketmq.broker.node import SERVICE_NOT_AVAILABLE, Node

_HEARTBEAT_S: Final = 3.0
_STEP_S: Final = 0.25
_SOON_S: Final = 0.3
_SESSION_MS: Final = 10_000
_QUIET_S: Final = 0.5
_MEMBERS_A_REQUEST: Final = 100

Queue = tuple[str, int]
Key = tuple[str, str]
"""Group and client id."""


@dataclass(slots=True, eq=False)
class Session:
    """One client in one group, as the coordinator knows it."""

    group: str
    client_id: str
    topics: frozenset[str] = frozenset()
    joined: bool = False
    generation: int = 0
    due: float = 0.0
    assigned: set[Queue] = field(default_factory=set)
    told: set[Queue] = field(default_factory=set)
    is_told: bool = False
    """Whether the coordinator has got ``told``."""
    reading: dict[Queue, float] = field(default_factory=dict)
    """Queues with a pull: when it was answered, 0 while one is under way."""
    others: list[str] = field(default_factory=list)
    """Members of the group that are not clients of this server."""
    is_asking: bool = False

    @property
    def key(self) -> Key:
        return self.group, self.client_id

    def owned(self, now: float) -> set[Queue]:
        """The queues that the client reads, or may begin to read."""
        for queue in [queue for queue, at in self.reading.items() if at and now - at > _QUIET_S]:
            if queue not in self.assigned:
                del self.reading[queue]
        return self.assigned | (self.told & self.reading.keys())


class Sessions:
    """See the module. ``notify`` is called with a group whose members or queues are others now."""

    def __init__(self, node: Node, loop: asyncio.AbstractEventLoop, log: Log, notify: Callable[[str], None]) -> None:
        self._node, self._loop, self._log, self._notify = node, loop, log, notify
        self.instance = f"rocketmq-{os.getpid()}-{os.urandom(4).hex()}"
        """Names this process among those that speak for clients."""
        self.leaving: Callable[[str], Awaitable[None]] | None = None
        """Is awaited with the name of a group before a member leaves it: its last offsets are stored as the member's."""
        self._sessions: dict[Key, Session] = {}
        self._due: list[tuple[float, int, Session]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, group: str, client_id: str) -> Session | None:
        """The session of a client in a group."""
        return self._sessions.get((group, client_id))

    def keys_of(self, group: str) -> list[Key]:
        """The sessions of a group."""
        return [key for key in self._sessions if key[0] == group]

    def subscribe(self, group: str, client_id: str, topics: frozenset[str]) -> None:
        """The client reads these topics: it joins soon, unless it has joined with the same."""
        session = self._sessions.get((group, client_id))
        if session is None:
            session = self._sessions[group, client_id] = Session(group, client_id)
        if session.topics != topics:
            session.topics, session.joined = topics, False
            self._plan(session, self._loop.time())

    def take_out(self, group: str, client_id: str) -> Session | None:
        """Forget the session. :meth:`leave` must follow if it has joined."""
        return self._sessions.pop((group, client_id), None)

    def leave(self, session: Session, then: Callable[[], None] | None = None) -> None:
        """Let the member leave, and call ``then``."""
        self._spawn(self._leave(session, then))

    async def close(self) -> None:
        """All clients leave their groups."""
        if self._timer is not None:
            self._timer.cancel()
        sessions, self._sessions = list(self._sessions.values()), {}
        await asyncio.gather(*(self._leave(session) for session in sessions if session.joined))

    # ------------------------------------------------------------ times

    def _plan(self, session: Session, due: float) -> None:
        session.due = due
        heapq.heappush(self._due, (due, next(self._numbers), session))
        self._arm()

    def _later(self) -> float:
        """The time of the next heartbeat: at a whole step, together with others."""
        return math.ceil((self._loop.time() + _HEARTBEAT_S) / _STEP_S) * _STEP_S

    def _arm(self) -> None:
        if not self._due:
            return
        first = self._due[0][0]
        if self._timer is not None:
            if self._timer.when() <= first:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(first, self._turn)

    def _turn(self) -> None:
        """Ask for all sessions that are due."""
        self._timer = None
        now = self._loop.time()
        beating: list[Session] = []
        while self._due and self._due[0][0] <= now:
            due, _, session = heapq.heappop(self._due)
            # An entry is void when another one followed. What is asked for now is planned again when it has its answer.
            if session.due != due or session.is_asking or self._sessions.get(session.key) is not session:
                continue
            session.is_asking = True
            if session.joined:
                beating.append(session)
            else:
                self._spawn(self._join(session))
        for at in range(0, len(beating), _MEMBERS_A_REQUEST):
            self._spawn(self._beat(beating[at : at + _MEMBERS_A_REQUEST]))
        self._arm()

    def _asked(self, session: Session, due: float) -> None:
        """A question for the session has its answer; the next one is ``due``."""
        session.is_asking = False
        if self._sessions.get(session.key) is session:
            self._plan(session, due if session.joined else min(due, session.due))
        elif session.joined:  # it was taken out while it joined
            self.leave(session)

    # ------------------------------------------------------------ questions

    async def _join(self, session: Session) -> None:
        topics, owned = session.topics, session.owned(self._loop.time())
        session.told, session.due = owned, self._later()
        due = session.due
        try:
            answer = await self._node.ask(
                "coordinator",
                "group.join",
                group=session.group,
                member=session.client_id,
                instance=self.instance,
                owned=_listed(owned),
                generation=session.generation,
                members=True,
                topics=sorted(topics),
                session_timeout_ms=_SESSION_MS,
            )
        except ProtocolError as error:
            due = self._refused(session, error)
        else:
            session.joined = session.topics == topics
            session.is_told = True
            due = self._take(session, answer)
        finally:
            self._asked(session, due)

    async def _beat(self, sessions: list[Session]) -> None:
        """One heartbeat of each session."""
        now, members = self._loop.time(), []
        for session in sessions:
            owned = session.owned(now)
            one: dict[str, Any] = {
                "group": session.group,
                "member": session.client_id,
                "generation": session.generation,
            }
            if not session.is_told or owned != session.told:
                one["owned"] = _listed(owned)
            session.told, session.is_told = owned, False
            members.append(one)
            session.due = self._later()
        due = [session.due for session in sessions]
        try:
            answer = await self._node.ask("coordinator", "group.heartbeats", instance=self.instance, members=members)
        except ProtocolError as error:
            for index, session in enumerate(sessions):
                due[index] = self._refused(session, error)
        else:
            for session in sessions:
                session.is_told = True
            for index, fields in answer["changed"]:
                due[index] = self._take(sessions[index], fields)
            for index, code, sentence in answer["refused"]:
                due[index] = self._refused(sessions[index], ProtocolError(code, sentence))
        finally:
            for index, session in enumerate(sessions):
                self._asked(session, due[index])

    def _refused(self, session: Session, error: ProtocolError) -> float:
        """When to ask again."""
        session.is_told = False
        if error.code == SERVICE_NOT_AVAILABLE:  # whether the member is still one its next heartbeat shows
            return self._loop.time() + _SOON_S
        session.joined = False
        if error.code in ("UNKNOWN_MEMBER", "FENCED"):
            return self._loop.time() + _SOON_S
        self._log.warning("a client is no member of its group", group=session.group, client=session.client_id,
                          code=error.code, error=error.message)  # fmt: skip
        return self._later()

    def _take(self, session: Session, answer: dict[str, Any]) -> float:
        """Take an answer. When to ask again."""
        session.generation = int(answer["generation"])
        before, session.assigned = session.assigned, {(topic, queue) for topic, queue in answer["assigned"]}
        others = session.others
        if "members" in answer:
            session.others = [name for name, instance in answer["members"] if instance != self.instance]
        if session.others != others or session.assigned != before:
            self._notify(session.group)
        return self._loop.time() + _SOON_S if answer["revoke"] else self._later()

    async def _leave(self, session: Session, then: Callable[[], None] | None = None) -> None:
        """The member's last offsets come before its leave, or together with it: clients send them without waiting."""
        try:
            if self.leaving is not None:
                await self.leaving(session.group)
            await self._node.ask(
                "coordinator", "group.leave", group=session.group, member=session.client_id, instance=self.instance
            )
        except ProtocolError as error:
            self._log.debug("a client could not leave its group", group=session.group, error=error.message)
        finally:
            if then is not None:
                then()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _listed(queues: set[Queue]) -> list[list[Any]]:
    return [list(queue) for queue in sorted(queues)]
