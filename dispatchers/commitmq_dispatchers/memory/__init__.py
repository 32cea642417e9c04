"""Memory topics: a separate store for topics with ``storage.type=memory``, under a byte budget.

Nothing is dispatched to this dispatcher: the node hands it the runs of its topics (hookspecs.TopicStore), and these
never reach the CommitLog. commitmq.store.memory.memory_files describes the files and the messages that readers may see.

An append has this order, and dying after any step is harmless: memory is reserved (fallocate: a store into a missing
page would be SIGBUS); records are copied, their first bytes last; units are written; TIMESTAMP and BOUND move. Only
then the node acknowledges. A restarted process continues at BOUND, and only BOUND decides: bytes behind it are zeroed,
units that point behind it are cut, and the next queue offset is the number of the first cut unit.

Budget: allocated memory counts. Segments grow in pieces, unit files in pages, and each topic has one page. Before an
allocation that would exceed the budget, segments are evicted until it fits:

1. the oldest segment of the topic that needs memory, unless it is the active one: a topic that takes much pays itself;
2. else the segment of all topics that was begun first, including the active one of a topic that went quiet: such a
   topic is then empty, and continues with the next segment and the next queue offset.

Units go with the segments that they point into (``units``). Never evicted are one page for each topic and, for each
queue that was ever used, the page with its last unit. If the budget does not hold a send beside these pages, the send
is refused.
"""

from __future__ import annotations

from commitmq.config import NodeConfig
from commitmq.plugin.hookspecs import DispatcherSpec, hookimpl
from commitmq_dispatchers.memory.store import MemoryStore

__all__ = ["MemoryStore", "commitmq_dispatchers"]


@hookimpl
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:
    """The built-in store of memory topics."""
    if not config.memory.enable:
        return []
    return [DispatcherSpec("memory", "commitmq_dispatchers.memory:MemoryStore", stores_topics=True)]
