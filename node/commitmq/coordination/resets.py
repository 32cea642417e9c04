"""Queues whose committed offset was reset while a member of the group reads them: the member begins them *anew*.

A reset gives the queue to its holder a second time, with a new generation. So a commit that the holder sent before it knew
is FENCED. The answers to the holder name the queue until the holder has read one of them, which its next generation says. It
drops the queue then, without a commit, and begins at the committed offset.

When the coordinator dies between a reset and these answers, its successor does not know of the reset. Members that come
back compare the committed offsets with their own, and a commit names the offset that its member knew; so the reset stays.
"""

from __future__ import annotations

from commitmq.coordination.membership import Member, Membership, Queue


def begin_anew(group: Membership, queue: Queue) -> None:
    """Let the member that holds ``queue`` begin it anew. Without one nothing happens."""
    holder = group.holders.get(queue)
    if holder is None:
        return
    member = group.members[holder]
    group.generation += 1
    member.held[queue] = member.anew[queue] = group.generation
    member.claims.discard(queue)
    member.told = None  # its next answer has the new generation


def to_begin_anew(member: Member, read_generation: int) -> list[Queue]:
    """The queues that ``member`` must begin anew; ``read_generation`` is the newest that it has read."""
    if not member.anew:
        return []
    for queue, generation in list(member.anew.items()):
        if read_generation >= generation or queue not in member.held:
            del member.anew[queue]
    return sorted(member.anew)
