"""Which slot of the control block belongs to which role."""

from __future__ import annotations

# One slot of the control block per role. Dispatchers other than the ConsumeQueue's have DISPATCHER_BASE plus their
# dispatcher slot. Plugins' workers follow from WORKER_BASE on; the supervisor assigns their slots.
DISPATCHER_BASE = 30
WORKER_BASE = 46
ROLE_SLOTS = {
    "supervisor": 0,
    "recovery": 1,
    "coordinator": 2,
    "dispatcher-consume_queue": 3,
    "reput": 4,
    "flush": 5,
    "allocate": 6,
    "writer": 7,
    "cleanup": 8,
    "discovery": 9,
    "schedule": 10,
    "timer": 11,
    "transaction": 12,
    "pop": 13,
    "reader-0": 14,  # reader-i is 14 + i: up to 16 readers have the slots 14..29 for themselves
    "dispatcher-index": DISPATCHER_BASE + 1,
    "dispatcher-memory": DISPATCHER_BASE + 2,
}


def role_slot(role: str) -> int:
    """Worker slot of ``role`` in the control block."""
    if role.startswith("reader-"):
        return ROLE_SLOTS["reader-0"] + int(role.removeprefix("reader-"))
    return ROLE_SLOTS[role]
