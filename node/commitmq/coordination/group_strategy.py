"""Which strategy a group has: the first member that names one sets it, until the group has no members."""

from __future__ import annotations

from commitmq.coordination.allocation_table import AVERAGE, AllocationTable
from commitmq.coordination.membership import Membership
from commitmq.errors import ProtocolError


def use_strategy(group: Membership, strategy: AllocationTable | None) -> None:
    """Share the group's queues by ``strategy`` from now on. ProtocolError NO_PERMISSION when its members named another one."""
    if strategy is None or group.strategy == strategy.name:
        return
    if group.strategy is not None:
        raise ProtocolError(
            "NO_PERMISSION",
            f"the members of group {group.group} share queues by the strategy {group.strategy}, not {strategy.name}: name"
            " the same one, or none, or wait until they have left",
        )
    group.strategy = strategy.name
    group.table = None if strategy.name == AVERAGE else strategy
    group.rebalance()
