"""The table of all routes: what each takes, what it gives, and whether it changes something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from commitmq_plugins.dashboard.api import (
    audit,
    clients,
    dead_letters,
    delayed,
    groups,
    histories,
    machine,
    messages,
    overview,
    search,
    sending,
    tail,
    topics,
    traces,
    transactions,
)
from commitmq_plugins.dashboard.api.node import Node

ROOT: Final = "/api/v1"


@dataclass(frozen=True, slots=True)
class Route:
    """``work(node, asks)`` gives ``answers``. ``path`` has names of the request's values in braces. A POST changes
    something.
    """

    method: str
    path: str
    work: Callable[[Node, Any], Any]
    asks: type[Any]
    answers: type[Any]
    summary: str

    def matches(self, path: str) -> dict[str, str] | None:
        """The values in a request's path, None for another path."""
        return match(self.path, path)


def match(pattern: str, path: str) -> dict[str, str] | None:
    """The values in braces of ``pattern``, decoded. Raises ValueError for a part that is no UTF-8."""
    wanted, given = pattern.split("/"), path.split("/")
    if len(wanted) != len(given):
        return None
    found = {}
    for part, value in zip(wanted, given, strict=True):
        if part.startswith("{"):
            if not value:
                return None
            found[part[1:-1]] = unquote(value, errors="strict")
        elif part != value:
            return None
    return found


ROUTES: Final = (
    Route("GET", f"{ROOT}/overview", overview.overview, overview.Nothing, overview.Overview, "The node in one answer"),
    Route("GET", f"{ROOT}/topics", topics.topics, topics.TopicsAsked, topics.Topics, "Topics, 50 a page"),
    Route("POST", f"{ROOT}/topics", topics.create_topic, topics.NewTopic, topics.TopicMade, "Create a topic"),
    Route("GET", f"{ROOT}/topics/{{topic}}", topics.topic, topics.TopicAsked, topics.Topic, "A topic and its queues"),
    Route(
        "GET", f"{ROOT}/topics/{{topic}}/messages", messages.messages, messages.MessagesAsked, messages.Messages,
        "Messages of a topic: the newest, or from an offset or a time on",
    ),
    Route(
        "POST", f"{ROOT}/topics/{{topic}}/messages", sending.send_message, sending.NewMessage, sending.Sent,
        "Send a test message",
    ),
    Route(
        "GET", f"{ROOT}/messages/{{id}}", search.message, search.MessageAsked, search.MessagePage,
        "A message by its id, or with its topic by its unique id",
    ),
    Route("GET", f"{ROOT}/search", search.search, search.SearchAsked, search.Found, "Messages by key, or one by its id"),
    Route("GET", f"{ROOT}/groups", groups.groups, groups.GroupsAsked, groups.Groups, "Groups, 50 a page"),
    Route("GET", f"{ROOT}/groups/{{group}}", groups.group, groups.GroupAsked, groups.Group, "A group by queues"),
    Route(
        "GET", f"{ROOT}/groups/{{group}}/reset", groups.preview_reset, groups.ResetAsked, groups.Reset,
        "What a reset would do",
    ),
    Route("POST", f"{ROOT}/groups/{{group}}/reset", groups.reset, groups.ResetWanted, groups.Reset, "Reset a group"),
    Route(
        "GET", f"{ROOT}/dlq", dead_letters.dead_groups, dead_letters.DeadGroupsAsked, dead_letters.DeadGroups,
        "Groups with dead letters",
    ),
    Route(
        "GET", f"{ROOT}/dlq/{{group}}", dead_letters.dead_letters, dead_letters.DeadLettersAsked,
        dead_letters.DeadLetters, "Dead letters of a group",
    ),
    Route(
        "POST", f"{ROOT}/dlq/{{group}}/resend", dead_letters.resend, dead_letters.ResendWanted, dead_letters.Resend,
        "Send a selection of dead letters again",
    ),
    Route("GET", f"{ROOT}/messages/{{id}}/trace", traces.trace, traces.TraceAsked, traces.Trace, "The trace of a message"),
    Route(
        "GET", f"{ROOT}/delayed", delayed.delayed, delayed.DelayedAsked, delayed.Delayed,
        "Messages that wait for their time",
    ),
    Route(
        "GET", f"{ROOT}/delayed/{{handle}}", delayed.preview_recall, delayed.RecallAsked, delayed.Recall,
        "What a cancellation would do",
    ),
    Route(
        "POST", f"{ROOT}/delayed/{{handle}}", delayed.recall, delayed.RecallWanted, delayed.Recall,
        "Cancel a message that waits",
    ),
    Route(
        "GET", f"{ROOT}/transactions", transactions.transactions, transactions.TransactionsAsked,
        transactions.Transactions, "Transactions without an end",
    ),
    Route(
        "GET", f"{ROOT}/transactions/{{id}}", transactions.preview_end, transactions.EndAsked,
        transactions.TransactionEnd, "What an end would do",
    ),
    Route(
        "POST", f"{ROOT}/transactions/{{id}}", transactions.end_transaction, transactions.EndWanted,
        transactions.TransactionEnd, "Commit or roll back a transaction by hand",
    ),
    Route(
        "GET", f"{ROOT}/topics/{{topic}}/tail", tail.tail, tail.TailAsked, tail.Tail,
        "The newest messages of a topic, and what is new since the look before",
    ),
    Route(
        "GET", f"{ROOT}/history", histories.node_history, histories.NodeHistoryAsked, histories.History,
        "Bytes a second that the node wrote",
    ),
    Route(
        "GET", f"{ROOT}/topics/{{topic}}/history", histories.topic_history, histories.TopicHistoryAsked,
        histories.History, "Messages a second of a topic",
    ),
    Route(
        "GET", f"{ROOT}/groups/{{group}}/history", histories.group_history, histories.GroupHistoryAsked,
        histories.History, "How far a group was behind",
    ),
    Route("GET", f"{ROOT}/clients", clients.clients, clients.ClientsAsked, clients.Clients, "Members and connections"),
    Route("GET", f"{ROOT}/audit", audit.audit, audit.AuditAsked, audit.AuditLines, "The audit log, the newest first"),
    Route("GET", f"{ROOT}/processes", machine.processes, overview.Nothing, machine.Processes, "The node's processes"),
    Route("GET", f"{ROOT}/plugins", machine.plugins, overview.Nothing, machine.Plugins, "Plugins and dispatchers"),
    Route("GET", f"{ROOT}/storage", machine.storage, overview.Nothing, machine.Storage, "The store's files"),
    Route("GET", f"{ROOT}/users", machine.users, machine.UsersAsked, machine.Users, "Users, without secrets"),
)  # fmt: skip
