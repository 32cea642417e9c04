"""SQL92 message filters with RocketMQ's rules: ``price > 10 AND region IN ('eu', 'us')`` on a message's properties.

Built in through the same hook that third parties use. :mod:`.parser` reads expressions into nodes of a tree,
:mod:`.evaluator` judges messages, a batch at a time.
"""

from __future__ import annotations

from commitmq.config import NodeConfig
from commitmq.plugin.hookspecs import FilterSpec, hookimpl

TYPE = "SQL92"


@hookimpl
def commitmq_filters(config: NodeConfig) -> list[FilterSpec]:
    """The type SQL92, unless ``filter.sql_enabled`` is off."""
    if not config.filter.sql_enabled:
        return []
    return [FilterSpec(TYPE, "commitmq_plugins.sql92.evaluator:SqlFilter")]
