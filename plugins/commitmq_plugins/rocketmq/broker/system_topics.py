"""RocketMQ's system topics: those of its broker itself (remoting 1.8)."""

from __future__ import annotations

from typing import Final

SYSTEM_PREFIX: Final = "rmq_sys_"
SYSTEM_TOPICS: Final = (
    *("SELF_TEST_TOPIC", "TBW102", "BenchmarkTest", "OFFSET_MOVED_EVENT", "SCHEDULE_TOPIC_XXXX"),
    *("RMQ_SYS_TRACE_TOPIC", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"),
    *("RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"),
    *("TRANS_CHECK_MAX_TIME_TOPIC", "rmq_sys_wheel_timer"),
)
"""Those whose names are the same for every broker."""

_NAMES: Final = frozenset(SYSTEM_TOPICS)


def is_system_topic(topic: str) -> bool:
    return topic in _NAMES or topic.startswith(SYSTEM_PREFIX)
