"""What is wrong with a node, from its own reports: the rules of ``commitmq doctor``. Pure: reads no node and no file.

A finding has a ``level``: ``error`` (something does not work), ``warning`` (it will not, or works badly), ``note`` (worth to
know). ``what`` names the thing, ``says`` what was seen, ``do`` what to do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from commitmq.format.constants import RETRY_PREFIX
from commitmq.semantics.retry import is_retry_topic
from commitmq.store.metadata.topic_config import is_system_group
from commitmq.supervision.exit_codes import progress_sentence

ERROR: Final = "error"
WARNING: Final = "warning"
NOTE: Final = "note"
_LEVELS: Final = (ERROR, WARNING, NOTE)
_LAG_BYTES: Final = 64 << 20
_LEAST_DESCRIPTORS: Final = 4_096
_CLOCK_S: Final = 60
_RESTARTS: Final = 3


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A fault of a node that ``commitmq doctor`` names."""

    level: str
    what: str
    says: str
    do: str

    def to_json(self) -> dict[str, str]:
        return {"level": self.level, "what": self.what, "says": self.says, "do": self.do}


def of_report(report: Mapping[str, Any], now_ms: int | None = None) -> list[DoctorFinding]:
    """The findings in the answer to ``status``; the worst first."""
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    found = [
        *_of_node(report["node"]),
        *_of_disk(report),
        *_of_positions(report["positions"], now_ms),
        *(one for row in report["processes"] for one in _of_process(row)),
        *(one for row in report["dispatchers"] for one in _of_dispatcher(row)),
        *_of_plugins(report["plugins"]),
    ]
    return ordered(found)


def ordered(found: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """The worst first."""
    return sorted(found, key=lambda one: _LEVELS.index(one.level))


def _of_node(node: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    if node["state"] != "ready":
        yield DoctorFinding(
            WARNING, "node", f"it is {node['state']}", "wait, and look again; `commitmq status` shows progress"
        )
    if node["keeper"] == "gone":
        yield DoctorFinding(
            WARNING,
            "keeper",
            "nothing would start the supervisor again if it were killed",
            "restart the node when it suits",
        )
    if node["index_problem"]:
        yield DoctorFinding(
            WARNING,
            "index",
            str(node["index_problem"]),
            "stop it, then `commitmq store rebuild --only index`",
        )
    for told in node.get("remaking") or ():
        yield DoctorFinding(
            NOTE, told["role"], progress_sentence(told), "wait; queries say `there may be more` until then"
        )
    security = node.get("security") or {}
    for sentence in security.get("faults") or ():
        yield DoctorFinding(ERROR, "security", str(sentence), "do what it says before the next start; docs/security.md")
    if security.get("users") and not security["node_keys"]:
        says = "the node has users, and its own protocol asks nobody who they are: it has no node keys"
        yield DoctorFinding(WARNING, "security", says, "`commitmq keys init`, then stop and start the node")
    if node.get("refuses_sends"):
        yield DoctorFinding(
            WARNING, "sends", "the node is drained, and refuses all sends", "`commitmq drain off` ends that"
        )
    for sentence in node.get("insecure") or ():
        yield DoctorFinding(
            WARNING, "listener", str(sentence), "listen on loopback, or have authentication and encryption"
        )
    for sentence in node.get("audit_faults") or ():
        yield DoctorFinding(
            ERROR, "audit log", str(sentence), "free space; give the store's owner its folder commitmq/audit"
        )
    if node["cuts_kept"]:
        yield DoctorFinding(
            NOTE,
            "log",
            f"the bytes of {node['cuts_kept']} cut(s) of the log are kept",
            "`commitmq status` has the files; `commitmq store repair DIR --restore-cut` puts back the last cut",
        )
    cut = node.get("last_log_cut") or {}
    if (lowered := cut.get("lowered") or {}).get("positions"):
        yield DoctorFinding(
            NOTE,
            "groups",
            f"the log ended at {cut['end']} ({cut['by']}), before what {lowered['groups']} group(s) had committed: "
            f"{lowered['positions']} offset(s) were lowered by {lowered['messages']} message(s) together",
            "see what was lost: `commitmq status`",
        )


def _of_disk(report: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    level = ERROR if report["disk_flags"] else WARNING
    for sentence in report["disk_warnings"]:
        yield DoctorFinding(level, "disk", str(sentence), "free space, or let messages expire: `commitmq store expire`")


def _of_positions(words: Mapping[str, int], now_ms: int) -> Iterator[DoctorFinding]:
    if words["flush_errno"]:
        yield DoctorFinding(
            ERROR,
            "flush",
            f"a sync of the log failed (errno {words['flush_errno']}), so the node takes no messages",
            "look at the device (dmesg), then restart the node",
        )
    ahead_s = (words["written_timestamp"] - now_ms) / 1000
    if ahead_s > _CLOCK_S:
        yield DoctorFinding(
            WARNING,
            "clock",
            f"the newest message was stored {ahead_s:.0f} s from now",
            "set the clock; keep it with NTP",
        )
    behind = words["written"] - words["dispatched"]
    if behind > _LAG_BYTES:
        yield DoctorFinding(
            WARNING,
            "ConsumeQueues",
            f"{behind >> 20} MiB of the log are not readable yet",
            "see `commitmq status`",
        )


def _of_process(row: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    role, last = str(row["role"]), row.get("last_exit")
    if row["state"] in ("waiting", "starting") and row.get("pid") is None and row["restarts"]:
        yield DoctorFinding(
            ERROR, role, f"it is down; its last end: {last}: {row.get('last_error') or '-'}", "see node.log"
        )
    elif row["restarts"] >= _RESTARTS:
        yield DoctorFinding(
            WARNING, role, f"it was restarted {_times(row['restarts'])}; the last end: {last}", "see node.log"
        )
    elif row["restarts"]:
        yield DoctorFinding(
            NOTE, role, f"it was restarted {_times(row['restarts'])}; the last end: {last}", "see node.log"
        )
    if row.get("refused"):
        yield DoctorFinding(
            NOTE,
            role,
            f"{row['refused']} requests were over a rate or a limit of [flow]",
            "raise it: `commitmq config set`",
        )
    info = row.get("info") or {}
    if unheard := info.get("unheard_groups"):
        says = f"no producer can be asked about the transactions of {', '.join(unheard)}; they will be given up"
        yield DoctorFinding(
            WARNING, role, says, "start a program with a producer of the group, or `commitmq transaction resolve`"
        )
    if aside := info.get("set_aside"):
        says = f"{aside} message{'' if aside == 1 else 's'} set aside: not even a dead letter could be made of them"
        yield DoctorFinding(WARNING, role, says, "`commitmq dlq stuck` lists them")
    if rival := info.get("rival"):
        says = f"the broker at {rival} registers under this node's broker name too: clients reach one of both, by turns"
        yield DoctorFinding(ERROR, role, says, "give each node its own network.broker_name")
    expiry = info.get("expiry") or {}
    if expiry.get("error"):
        yield DoctorFinding(
            ERROR, "expiry", f"old messages cannot be deleted: {expiry['error']}", "mend that; the disk fills up"
        )
    if expiry.get("overrode"):
        over = expiry["overrode"]
        says = f"{over['segments']} segments were deleted although they were needed by {over['needed_by']}: the disk was full"
        yield DoctorFinding(ERROR, "expiry", says, "have more space, or a smaller retention.store_bytes")
    if expiry.get("held_bytes"):
        who = ", ".join(expiry.get("held_by") or ()) or "a process"
        yield DoctorFinding(
            NOTE,
            "expiry",
            f"{expiry['held_bytes'] >> 20} MiB of deleted segments are held by {who}",
            "restart that program",
        )
    if info.get("clock"):
        says = f"the clock was {info['clock']['was_ahead_ms'] / 1000:.0f} s ahead when messages were stored"
        yield DoctorFinding(WARNING, "clock", says, "keep the clock with NTP")


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _of_dispatcher(row: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    name = f"dispatcher {row['name']}"
    if row["state"] == "parked":
        yield DoctorFinding(
            ERROR,
            name,
            f"it is parked at {row['parked']}",
            f"`commitmq dispatcher retry {row['name']}` or `skip` after a look",
        )
    elif (row["lag_bytes"] or 0) > _LAG_BYTES:
        yield DoctorFinding(
            WARNING, name, f"it is {row['lag_bytes'] >> 20} MiB behind the log", "see `commitmq status`"
        )
    if row["gaps"]:
        yield DoctorFinding(
            WARNING, name, f"{len(row['gaps'])} parts of the log expired before it read them", "raise the retention"
        )
    if row["skipped"]:
        yield DoctorFinding(
            NOTE, name, f"{len(row['skipped'])} records were skipped manually", "`commitmq dispatcher list` shows them"
        )


def _of_plugins(plugins: Iterable[Mapping[str, Any]]) -> Iterator[DoctorFinding]:
    for plugin in plugins:
        if plugin["failure"]:
            why = str(plugin["failure"]).strip().splitlines()[-1]
            says = f"it failed in {plugin['failed_in']}: {why}"
            yield DoctorFinding(ERROR, f"plugin {plugin['name']}", says, "`commitmq plugins` shows the whole failure")


def of_group(group: Mapping[str, Any], lags: Iterable[Any]) -> list[DoctorFinding]:
    """The findings of one consumer group: its description, and its lag by queue.

    Groups of the system have none: no program is their member, and their offsets are the node's own positions.
    """
    if is_system_group(group["name"]):
        return []
    name, members, rows = f"group {group['name']}", group["members"], list(lags)
    found = [_of_queue(group["name"], row) for row in rows if row.problem]
    subscriptions = {tuple(sorted(member["topics"])) for member in members}
    if len(subscriptions) > 1:
        told = "; ".join(", ".join(topics) or "nothing" for topics in sorted(subscriptions))
        found.append(
            DoctorFinding(
                WARNING, name, f"its members subscribe to different topics: {told}", "let all programs of a group agree"
            )
        )
    behind = sum(row.lag for row in rows)
    if behind and not members:
        advice = f"start its program, or delete its offsets: `commitmq group delete {group['name']} --offsets`"
        found.append(DoctorFinding(NOTE, name, f"{behind} messages behind, and no member", advice))
    return found


def of_dead_letters(counts: Iterable[tuple[str, int]]) -> list[DoctorFinding]:
    """The findings of groups with dead letters: ``(group, number)`` each."""
    return [
        DoctorFinding(
            WARNING,
            f"group {group}",
            f"{dead} dead letter{'' if dead == 1 else 's'}",
            f"`commitmq dlq list {group}`; then resend or purge them",
        )
        for group, dead in counts
    ]


def of_retry_topics(topics: Iterable[str], groups: Iterable[str]) -> list[DoctorFinding]:
    """The findings of retry topics that several groups have, because ``%RETRY%a_b`` can be made in more than one way.

    Groups that share the queues of a topic have one retry topic for it (:mod:`commitmq.semantics.pop`). Who may read one
    of the groups reads what failed in the others. ``topics`` and ``groups`` are all of the node.
    """
    topics, groups, found = set(topics), set(groups), []
    for topic in sorted(filter(is_retry_topic, topics)):
        name = topic.removeprefix(RETRY_PREFIX)
        places = [at for at, char in enumerate(name) if char == "_"]
        owners = [name] if name in groups else []
        owners += [name[:at] for at in places if name[:at] in groups and name[at + 1 :] in topics]
        if len(owners) > 1:
            says = f"the groups {', '.join(owners)} have this retry topic together, whatever their users' rights are"
            found.append(
                DoctorFinding(WARNING, topic, says, "set pop.retry_topics_v2, or rename a group; docs/security.md")
            )
    return found


def _of_queue(group: str, row: Any) -> DoctorFinding:
    """The finding of a queue with a problem: the group is behind in it, so nobody reads it, or it is beyond its end."""
    name, where = f"group {group}", f"{row.topic} queue {row.queue}"
    if row.lag:
        advice = f"`commitmq topic update {row.topic} --read-queues {row.queue + 1}`"
        return DoctorFinding(WARNING, name, f"{where}: {row.lag} messages behind, and {row.problem}", advice)
    return DoctorFinding(ERROR, name, f"{where}: {row.problem}", f"`commitmq group reset {group}`")


def of_limits(descriptors: Mapping[str, int]) -> list[DoctorFinding]:
    """The findings of processes by the number of descriptors that each may open."""
    low = sorted(role for role, most in descriptors.items() if most < _LEAST_DESCRIPTORS)
    if not low:
        return []
    says = f"{', '.join(low)} may open {min(descriptors[role] for role in low)} descriptors"
    return [
        DoctorFinding(
            WARNING, "descriptors", says, f"allow {_LEAST_DESCRIPTORS} (LimitNOFILE=, ulimit -n), and restart"
        )
    ]
