"""Which process writes which file of a store, and which word of the control block: the single-writer principle as data.

Every file and every word has exactly one writing process while a node runs. Three processes use the store alone before
and after that, and may then write the files of others:

* recovery, before any worker has started: it mends the store, and sets the first value of each word;
* the supervisor, after the last worker has ended: it confirms the durable positions;
* an offline verb (``commitmq store …``), which holds the store's lock, so that no node runs.

The table in ARCHITECTURE.md is generated from this module (``python -m commitmq.ownership``). Tests check the rules: the
code may put a word only in the modules of its process (``tests/unit/test_ownership.py``), and a file of a live node is
open for writing only in the process that owns it (``tests/contract/test_who_writes.py``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType

from commitmq.control import DispatcherWord, Word, WorkerWord


class Role(StrEnum):
    """A process of a node."""

    KEEPER = "keeper"
    SUPERVISOR = "supervisor"
    RECOVERY = "recovery"
    WRITER = "writer"
    FLUSH = "flush"
    ALLOCATE = "allocate"
    REPUT = "reput"
    CONSUME_QUEUE = "dispatcher-consume_queue"
    INDEX = "dispatcher-index"
    MEMORY = "dispatcher-memory"
    DISPATCHER = "dispatcher-NAME"
    WORKER = "worker-NAME"
    READER = "reader-N"
    COORDINATOR = "coordinator"
    CLEANUP = "cleanup"
    SCHEDULE = "schedule"
    TIMER = "timer"
    POP = "pop"
    EACH = "each worker"
    USER_VERB = "`commitmq user`, `keys` or worker-NAME"


@dataclass(frozen=True, slots=True)
class FileOwner:
    """The writing process of the files that match ``pattern``, below the root of the store."""

    pattern: str
    """A shell pattern of paths; ``*`` also stands for ``/``."""
    writes: Role
    """The process that writes the content."""
    holds: str
    """The content."""
    makes: Role | None = None
    """The process that creates the file, when it is another one."""
    removes: Role | None = None
    """The process that unlinks the file, when it is another one."""
    after_cut: str = ""
    """For a file that names a place in the log or in a queue: what is done with it when the log ends earlier than before
    (:mod:`commitmq.store.recovery.cut_history`).
    """


_EARLIER = "goes back to the newest positions that need no more of the log, or looks at everything again"
_LOWERED = "lowered to the ends of the queues, durably"
_FORGOTTEN = "states that know messages behind the end of their queue are forgotten"
_UNITS = "units that lead behind the end are cut"

# The first matching pattern decides.
FILES: tuple[FileOwner, ...] = (
    FileOwner(
        "commitlog/*",
        Role.WRITER,
        "records; with the transient store pool flush copies them there instead",
        makes=Role.ALLOCATE,
        removes=Role.CLEANUP,
        after_cut="ends there",
    ),
    FileOwner("consumequeue/*", Role.CONSUME_QUEUE, "units of 20 bytes", after_cut=_UNITS),
    FileOwner(
        "consumequeue_ext/*", Role.CONSUME_QUEUE, "filter bit maps", after_cut="read through the units that are left"
    ),
    FileOwner("batchconsumequeue/*", Role.CONSUME_QUEUE, "units of 46 bytes of BatchCQ topics", after_cut=_UNITS),
    FileOwner(
        "index/*",
        Role.INDEX,
        "hash slots and items",
        after_cut="items that lead behind the end are cut, or the file is rebuilt",
    ),
    FileOwner("config/topics.json*", Role.COORDINATOR, "topics, for RocketMQ"),
    FileOwner(
        "config/messageRequestMode.json*", Role.WORKER, "RocketMQ's: how groups receive topics; of rocketmq_broker"
    ),
    FileOwner(
        "config/security/*",
        Role.USER_VERB,
        "users, policies, and the node's keys; a lock lets one change happen at a time",
    ),
    FileOwner("config/consumerOffset.json*", Role.COORDINATOR, "committed offsets, for RocketMQ", after_cut=_LOWERED),
    FileOwner("config/subscriptionGroup.json*", Role.COORDINATOR, "consumer groups"),
    FileOwner("config/consumerFilter.json*", Role.COORDINATOR, "SQL filters of groups"),
    FileOwner(
        "config/delayOffset.json*", Role.SCHEDULE, "how far each delay level is, for RocketMQ", after_cut=_EARLIER
    ),
    FileOwner(
        "commitmq/schedule.json*",
        Role.SCHEDULE,
        "the same, and where deliveries behind it begin in the log",
        after_cut=_EARLIER,
    ),
    FileOwner("config/timercheck*", Role.TIMER, "how far the timer is, for RocketMQ", after_cut=_EARLIER),
    FileOwner("config/timermetrics*", Role.TIMER, "how many messages wait for each topic, for RocketMQ"),
    FileOwner(
        "commitmq/timer.json*",
        Role.TIMER,
        "the same, and where deliveries behind it begin in the log",
        after_cut=_EARLIER,
    ),
    FileOwner(
        "timerwheel*",
        Role.TIMER,
        "slots: the chains of timer log units that are due together",
        after_cut="rebuilt with the timer log, if the timer goes back",
    ),
    FileOwner(
        "timerlog/*",
        Role.TIMER,
        "units: the messages that wait for their time",
        after_cut="rebuilt with the wheel, if the timer goes back",
    ),
    FileOwner(
        "config/consumerOrderInfo.json*",
        Role.POP,
        "messages of queues that are received in order",
        after_cut=_FORGOTTEN,
    ),
    FileOwner(
        "commitmq/pop.json*",
        Role.POP,
        "from where on the log has received messages that are not done",
        after_cut=_EARLIER,
    ),
    FileOwner(
        "checkpoint*", Role.FLUSH, "RocketMQ's checkpoint", after_cut="rewritten; a cut below it needs an operator"
    ),
    FileOwner("abort*", Role.SUPERVISOR, "there while a node runs, or died"),
    FileOwner("lock", Role.SUPERVISOR, "held while a node runs"),
    FileOwner(
        "commitmq/position*",
        Role.FLUSH,
        "the sidecar: the next recovery may begin at its offsets",
        after_cut="rewritten; a cut below it needs an operator",
    ),
    FileOwner("commitmq/flush_failed", Role.FLUSH, "there after a failed sync of flush"),
    FileOwner("commitmq/writer_sync_failed", Role.WRITER, "there after a failed sync of the writer"),
    FileOwner(
        "commitmq/producers*",
        Role.WRITER,
        "the snapshot of idempotent producers",
        after_cut="removed if it covers more than is left: the writer makes the table from the log",
    ),
    FileOwner(
        "commitmq/queue_ends*",
        Role.CONSUME_QUEUE,
        "the queues and their ends",
        after_cut="rewritten when the queues are cut",
    ),
    FileOwner("commitmq/topics.journal*", Role.COORDINATOR, "changes of topics"),
    FileOwner(
        "commitmq/orders.journal*", Role.POP, "changes of queues that are received in order", after_cut=_FORGOTTEN
    ),
    FileOwner("commitmq/offsets.journal*", Role.COORDINATOR, "commits of groups", after_cut=_LOWERED),
    FileOwner("commitmq/group_members.log*", Role.COORDINATOR, "past members of groups"),
    FileOwner("commitmq/makers.log*", Role.COORDINATOR, "who made topics and groups"),
    FileOwner(
        "commitmq/deleted_topics.json*",
        Role.COORDINATOR,
        "tombstones of deleted topics",
        after_cut="lowered to the end of the log",
    ),
    FileOwner("commitmq/deleting_topics.json*", Role.COORDINATOR, "deletions that are not finished"),
    FileOwner(
        "commitmq/min_offset*",
        Role.CLEANUP,
        "the beginning of the log",
        after_cut="names the log's beginning, which no cut moves",
    ),
    FileOwner("commitmq/store.json*", Role.RECOVERY, "the store's identity and the sizes of its files"),
    FileOwner(
        "commitmq/cut_history*",
        Role.RECOVERY,
        "when and where the log ended earlier than before",
        after_cut="has the cut",
    ),
    FileOwner(
        "commitmq/cut/*",
        Role.RECOVERY,
        "bytes that recovery cut, for `store repair --restore-cut`",
        after_cut="has the cut bytes",
    ),
    FileOwner("commitmq/transient_pool.json*", Role.RECOVERY, "the place of the transient store pool"),
    FileOwner("commitmq/shared_memory.json*", Role.SUPERVISOR, "the folder of memory topics"),
    FileOwner("commitmq/sockets.json*", Role.SUPERVISOR, "the last folder of sockets outside of the store"),
    FileOwner("commitmq/epoch*", Role.SUPERVISOR, "counts starts of the node"),
    FileOwner("commitmq/node.log*", Role.EACH, "log lines, appended; the supervisor renames a long one"),
    FileOwner("commitmq/audit/users.jsonl*", Role.USER_VERB, "audit lines of changes of users, by the same lock"),
    FileOwner("commitmq/audit/*", Role.EACH, "audit lines of the worker of that name"),
    FileOwner(
        "commitmq/set_aside/*",
        Role.EACH,
        "messages that the worker of that name has set aside",
        after_cut="messages behind the end are taken out",
    ),
    FileOwner("commitmq/settings.json*", Role.SUPERVISOR, "changes by `commitmq config set`"),
    FileOwner(
        "commitmq/dispatchers/index*",
        Role.INDEX,
        "its position and state",
        after_cut="lowered to the end of the log; the index goes back when it is opened",
    ),
    FileOwner(
        "commitmq/dispatchers/*",
        Role.DISPATCHER,
        "the position and state of the dispatcher of that name",
        after_cut="lowered to the end of the log; the dispatcher's `truncate` is called when it is opened",
    ),
    FileOwner(
        "commitmq/workers/*",
        Role.WORKER,
        "files of the plugin's worker of that name",
        after_cut="a plugin's own; the word GENERATION tells it",
    ),
    FileOwner(
        "run/control",
        Role.EACH,
        "the control block; each word has a process, below",
        after_cut="recreated at each start",
    ),
    FileOwner("run/node.json*", Role.SUPERVISOR, "process id and addresses of the live node"),
    FileOwner("run/token*", Role.SUPERVISOR, "proves that a client that read it is on the same machine"),
    FileOwner("run/sockets*", Role.SUPERVISOR, "the folder of sockets, where the store's path is too long"),
    FileOwner("run/subscriptions.json*", Role.COORDINATOR, "SQL filters, for the ConsumeQueue dispatcher"),
    FileOwner("run/segment.new", Role.ALLOCATE, "a segment that is being made"),
    FileOwner(
        "run/index*",
        Role.INDEX,
        "index files that are being made, with the progress of one",
        after_cut="recreated at each start",
    ),
    FileOwner("run/*.lock", Role.EACH, "held by the worker of that name while it lives"),
    FileOwner("run/*.counts", Role.EACH, "what the worker of that name counted, for /metrics"),
    FileOwner("run/*.bell", Role.EACH, "wakes the worker of that name"),
    FileOwner("run/*.ipc", Role.EACH, "the ZeroMQ endpoint of the worker of that name"),
    FileOwner("run/*.sock", Role.WRITER, "the Unix socket for single sends and short runs"),
)

# Recovery sets the first value of a word before the word's own process starts.
WORDS: MappingProxyType[Word, Role] = MappingProxyType(
    {
        Word.MAGIC: Role.SUPERVISOR,
        Word.EPOCH: Role.SUPERVISOR,
        Word.WRITTEN: Role.WRITER,
        Word.WRITTEN_TIMESTAMP: Role.WRITER,
        Word.FLUSHED: Role.FLUSH,
        Word.FLUSH_ERRNO: Role.FLUSH,
        Word.ALLOCATED: Role.ALLOCATE,
        Word.DISK_FLAGS: Role.ALLOCATE,
        Word.REPUT: Role.REPUT,
        Word.MIN_OFFSET: Role.CLEANUP,
        Word.REDISPATCH_FROM: Role.RECOVERY,
        Word.FLUSH_WANTED: Role.WRITER,
        Word.WRITER_GENERATION: Role.WRITER,
        Word.TOPICS_VERSION: Role.COORDINATOR,
        Word.RECOVERED_END: Role.RECOVERY,
        Word.CRC_FROM: Role.RECOVERY,
        Word.SUBSCRIPTIONS_VERSION: Role.COORDINATOR,
        Word.GROUP_RESETS: Role.COORDINATOR,
        Word.GROUP_READS: Role.COORDINATOR,
        Word.SEGMENT_WANTED: Role.WRITER,
        Word.POOL_BUFFERS: Role.RECOVERY,
        Word.COMMITTED: Role.FLUSH,
        Word.COMMITTED_TIMESTAMP: Role.FLUSH,
        Word.WRITER_SYNC: Role.WRITER,
        Word.WRITER_SYNCED: Role.WRITER,
        Word.WRITER_SYNCED_TIMESTAMP: Role.WRITER,
        Word.FLUSHING: Role.FLUSH,
        Word.PRODUCERS_KNOWN: Role.WRITER,
        Word.PRODUCERS_WANTED: Role.CLEANUP,
        Word.MOVERS_WANTED: Role.CONSUME_QUEUE,
        Word.WRITER_TOPICS: Role.WRITER,
        Word.MEMORY_TOPICS: Role.MEMORY,
        Word.GENERATION: Role.RECOVERY,
    }
)

# The slot of a dispatcher belongs to its process (DISPATCHER); supervisor and recovery do not write it while it runs.
DISPATCHER_WORDS: MappingProxyType[DispatcherWord, Role] = MappingProxyType(
    dict.fromkeys(DispatcherWord, Role.DISPATCHER)
)

WORKER_WORDS: MappingProxyType[WorkerWord, Role] = MappingProxyType(
    dict.fromkeys(WorkerWord, Role.EACH) | {WorkerWord.RESTARTS: Role.SUPERVISOR}
)

# The process that runs each module; only modules that put a word of the control block are listed.
MODULES: MappingProxyType[str, Role] = MappingProxyType(
    {
        "commitmq.control": Role.SUPERVISOR,
        "commitmq.supervision.supervisor": Role.SUPERVISOR,
        "commitmq.supervision.process_table": Role.SUPERVISOR,
        "commitmq.supervision.worker_process": Role.SUPERVISOR,
        "commitmq.coordination.service": Role.COORDINATOR,
        "commitmq.coordination.operations": Role.COORDINATOR,
        "commitmq.coordination.subscriptions": Role.COORDINATOR,
        "commitmq.workers.allocate": Role.ALLOCATE,
        "commitmq.workers.cleanup": Role.CLEANUP,
        "commitmq.workers.coordinator": Role.COORDINATOR,
        "commitmq.workers.dispatcher.dispatch_host": Role.DISPATCHER,
        "commitmq.workers.dispatcher.mover_calls": Role.CONSUME_QUEUE,
        "commitmq.workers.dispatcher.process": Role.DISPATCHER,
        "commitmq.workers.flush": Role.FLUSH,
        "commitmq.workers.memory": Role.MEMORY,
        "commitmq.workers.pop.process": Role.POP,
        "commitmq.workers.reader.process": Role.READER,
        "commitmq.workers.recovery": Role.RECOVERY,
        "commitmq.workers.reput": Role.REPUT,
        "commitmq.workers.writer.log_tail": Role.WRITER,
        "commitmq.workers.writer.send_answers": Role.WRITER,
        "commitmq.workers.writer.send_requests": Role.WRITER,
        "commitmq.workers.writer.process": Role.WRITER,
        "commitmq.workers.writer.writer_sync": Role.WRITER,
    }
)


def owner_of(path: str) -> FileOwner | None:
    """The owner of the file at ``path`` (relative to the root of the store, with ``/``); None for a file without one."""
    for owner in FILES:
        if fnmatchcase(path, owner.pattern):
            return owner
    return None


def files_table() -> str:
    """The table of files as Markdown, for ARCHITECTURE.md."""
    rows = ["| File | Written by | Holds |", "|---|---|---|"]
    for owner in FILES:
        also = [f"made by {owner.makes}"] if owner.makes else []
        also += [f"removed by {owner.removes}"] if owner.removes else []
        who = f"{owner.writes} ({', '.join(also)})" if also else str(owner.writes)
        rows.append(f"| `{owner.pattern}` | {who} | {owner.holds} |")
    return "\n".join(rows) + "\n"


def cuts_table() -> str:
    """The files that name a place, and what is done with them after a cut of the log, as Markdown for ARCHITECTURE.md."""
    rows = ["| File | After a cut of the log |", "|---|---|"]
    rows += [f"| `{owner.pattern}` | {owner.after_cut} |" for owner in FILES if owner.after_cut]
    return "\n".join(rows) + "\n"


def words_table() -> str:
    """The table of the words of the control block as Markdown, for ARCHITECTURE.md."""
    rows = ["| Word | Written by |", "|---|---|"]
    rows += [f"| `{word.name}` | {role} |" for word, role in WORDS.items()]
    rows += [f"| dispatcher slot: `{word.name}` | {role} |" for word, role in DISPATCHER_WORDS.items()]
    rows += [f"| worker slot: `{word.name}` | {role} |" for word, role in WORKER_WORDS.items()]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(f"{files_table()}\n{cuts_table()}\n{words_table()}")
