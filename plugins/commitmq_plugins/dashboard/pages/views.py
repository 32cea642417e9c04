"""The table of pages: which function of :mod:`commitmq_plugins.dashboard.api` each shows, and with which template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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
from commitmq_plugins.dashboard.api.routes import match


@dataclass(frozen=True, slots=True)
class Page:
    """A page at ``path``. ``needs`` has sets of values: without all of one of them it is a form, and asks the node nothing."""

    method: str
    path: str
    template: str
    work: Callable[[Node, Any], Any]
    asks: type[Any]
    needs: tuple[tuple[str, ...], ...] = ()

    def matches(self, path: str) -> dict[str, str] | None:
        """The values in a request's path, None for another path."""
        return match(self.path, path)

    @property
    def picture(self) -> str:
        """Its name in the documentation's pictures: ``topics-topic-messages``."""
        return self.path.strip("/").translate({ord("{"): None, ord("}"): None, ord("/"): "-"}) or "overview"

    def is_only_a_form(self, given: Mapping[str, Sequence[Any]]) -> bool:
        """Whether a value is missing that a person gives next."""
        if not self.needs:
            return False
        return not any(all(any(given.get(name, ())) for name in names) for names in self.needs)


PAGES: Final = (
    Page("GET", "/", "overview.html", overview.overview, overview.Nothing),
    Page("GET", "/topics", "topics.html", topics.topics, topics.TopicsAsked),
    Page("POST", "/topics", "topic_made.html", topics.create_topic, topics.NewTopic),
    Page("GET", "/topics/{topic}", "topic.html", topics.topic, topics.TopicAsked),
    Page("GET", "/topics/{topic}/messages", "messages.html", messages.messages, messages.MessagesAsked),
    Page("POST", "/topics/{topic}/messages", "sent.html", sending.send_message, sending.NewMessage),
    Page("GET", "/messages/{id}", "message.html", search.message, search.MessageAsked),
    Page("GET", "/search", "search.html", search.search, search.SearchAsked, (("id",), ("topic", "key"))),
    Page("GET", "/groups", "groups.html", groups.groups, groups.GroupsAsked),
    Page("GET", "/groups/{group}", "group.html", groups.group, groups.GroupAsked),
    Page("GET", "/groups/{group}/reset", "reset.html", groups.preview_reset, groups.ResetAsked, (("to",),)),
    Page("POST", "/groups/{group}/reset", "reset.html", groups.reset, groups.ResetWanted),
    Page("GET", "/dlq", "dead_groups.html", dead_letters.dead_groups, dead_letters.DeadGroupsAsked),
    Page("GET", "/dlq/{group}", "dead_letters.html", dead_letters.dead_letters, dead_letters.DeadLettersAsked),
    Page("POST", "/dlq/{group}/resend", "resent.html", dead_letters.resend, dead_letters.ResendWanted),
    Page("GET", "/messages/{id}/trace", "trace.html", traces.trace, traces.TraceAsked),
    Page("GET", "/delayed", "delayed.html", delayed.delayed, delayed.DelayedAsked),
    Page("GET", "/delayed/{handle}", "recall.html", delayed.preview_recall, delayed.RecallAsked),
    Page("POST", "/delayed/{handle}", "recall.html", delayed.recall, delayed.RecallWanted),
    Page("GET", "/transactions", "transactions.html", transactions.transactions, transactions.TransactionsAsked),
    Page("GET", "/transactions/{id}", "transaction.html", transactions.preview_end, transactions.EndAsked),
    Page("POST", "/transactions/{id}", "transaction.html", transactions.end_transaction, transactions.EndWanted),
    Page("GET", "/topics/{topic}/tail", "tail.html", tail.tail, tail.TailAsked),
    Page("GET", "/history", "history.html", histories.node_history, histories.NodeHistoryAsked),
    Page("GET", "/topics/{topic}/history", "history.html", histories.topic_history, histories.TopicHistoryAsked),
    Page("GET", "/groups/{group}/history", "history.html", histories.group_history, histories.GroupHistoryAsked),
    Page("GET", "/clients", "clients.html", clients.clients, clients.ClientsAsked),
    Page("GET", "/audit", "audit.html", audit.audit, audit.AuditAsked),
    Page("GET", "/processes", "processes.html", machine.processes, overview.Nothing),
    Page("GET", "/plugins", "plugins.html", machine.plugins, overview.Nothing),
    Page("GET", "/storage", "storage.html", machine.storage, overview.Nothing),
    Page("GET", "/users", "users.html", machine.users, machine.UsersAsked),
)
