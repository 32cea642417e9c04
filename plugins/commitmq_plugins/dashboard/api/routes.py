"""The table of all routes: what each takes, what it gives, and whether it changes something.

The OpenAPI document of the routes, made from their dataclasses: what the server takes and gives is what it says.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from commitmq_plugins.dashboard.api import audit, clients, dead_letters, groups, machine, messages, search, topics
from commitmq_plugins.dashboard.api.node import Kind, Node, kind_of

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
    Route("GET", f"{ROOT}/overview", machine.overview, machine.Nothing, machine.Overview, "The node in one answer"),
    Route("GET", f"{ROOT}/topics", topics.topics, topics.TopicsAsked, topics.Topics, "Topics, 50 a page"),
    Route("POST", f"{ROOT}/topics", topics.create_topic, topics.NewTopic, topics.TopicMade, "Create a topic"),
    Route("GET", f"{ROOT}/topics/{{topic}}", topics.topic, topics.TopicAsked, topics.Topic, "A topic and its queues"),
    Route(
        "GET", f"{ROOT}/topics/{{topic}}/messages", messages.messages, messages.MessagesAsked, messages.Messages,
        "Messages of a topic: the newest, or from an offset or a time on",
    ),
    Route(
        "POST", f"{ROOT}/topics/{{topic}}/messages", messages.send_message, messages.NewMessage, messages.Sent,
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
    Route(
        "GET", f"{ROOT}/messages/{{id}}/trace", messages.trace, messages.TraceAsked, messages.Trace,
        "The trace of a message",
    ),
    Route(
        "GET", f"{ROOT}/delayed", dead_letters.delayed, dead_letters.DelayedAsked, dead_letters.Delayed,
        "Messages that wait for their time",
    ),
    Route(
        "GET", f"{ROOT}/delayed/{{handle}}", dead_letters.preview_recall, dead_letters.RecallAsked, dead_letters.Recall,
        "What a cancellation would do",
    ),
    Route(
        "POST", f"{ROOT}/delayed/{{handle}}", dead_letters.recall, dead_letters.RecallWanted, dead_letters.Recall,
        "Cancel a message that waits",
    ),
    Route(
        "GET", f"{ROOT}/transactions", dead_letters.transactions, dead_letters.TransactionsAsked,
        dead_letters.Transactions, "Transactions without an end",
    ),
    Route(
        "GET", f"{ROOT}/transactions/{{id}}", dead_letters.preview_end, dead_letters.EndAsked,
        dead_letters.TransactionEnd, "What an end would do",
    ),
    Route(
        "POST", f"{ROOT}/transactions/{{id}}", dead_letters.end_transaction, dead_letters.EndWanted,
        dead_letters.TransactionEnd, "Commit or roll back a transaction by hand",
    ),
    Route(
        "GET", f"{ROOT}/topics/{{topic}}/tail", messages.tail, messages.TailAsked, messages.Tail,
        "The newest messages of a topic, and what is new since the look before",
    ),
    Route(
        "GET", f"{ROOT}/history", machine.node_history, machine.NodeHistoryAsked, machine.History,
        "Bytes a second that the node wrote",
    ),
    Route(
        "GET", f"{ROOT}/topics/{{topic}}/history", machine.topic_history, machine.TopicHistoryAsked,
        machine.History, "Messages a second of a topic",
    ),
    Route(
        "GET", f"{ROOT}/groups/{{group}}/history", machine.group_history, machine.GroupHistoryAsked,
        machine.History, "How far a group was behind",
    ),
    Route("GET", f"{ROOT}/clients", clients.clients, clients.ClientsAsked, clients.Clients, "Members and connections"),
    Route("GET", f"{ROOT}/audit", audit.audit, audit.AuditAsked, audit.AuditLines, "The audit log, the newest first"),
    Route("GET", f"{ROOT}/processes", machine.processes, machine.Nothing, machine.Processes, "The node's processes"),
    Route("GET", f"{ROOT}/plugins", machine.plugins, machine.Nothing, machine.Plugins, "Plugins and dispatchers"),
    Route("GET", f"{ROOT}/storage", machine.storage, machine.Nothing, machine.Storage, "The store's files"),
    Route("GET", f"{ROOT}/users", machine.users, machine.UsersAsked, machine.Users, "Users, without secrets"),
)  # fmt: skip


VERSION: Final = "1.0.0"
_JSON_TYPES: Final = {"str": "string", "int": "integer", "bool": "boolean", "float": "number"}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    info = {"title": "CommitMQ dashboard", "version": VERSION, "description": "What the pages show and do, as JSON."}
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {"schemas": {**dict(sorted(schemas.items())), "Error": error}},
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(route.asks)
    parameters, body = [], {}
    required: list[str] = []
    for field in dataclasses.fields(route.asks):
        shown = _asked(kind_of(hints[field.name]), field)
        is_in_path = "{" + field.name + "}" in route.path
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if route.method == "POST" and not is_in_path:
            body[field.name] = shown
            required += [field.name] if needed else []
            continue
        doc = shown.pop("description", "")
        place = "path" if is_in_path else "query"
        parameters.append({"name": field.name, "in": place, "required": needed, "description": doc, "schema": shown})
    answer = {
        "description": "What is asked for",
        "content": {"application/json": {"schema": _shape(route.answers, schemas)}},
    }
    refused = {
        "description": "Why not",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.work.__name__,
        "parameters": parameters,
        "responses": {"200": answer, "default": refused},
    }
    if route.method == "POST":
        schema = {"type": "object", "properties": body, "required": required, "additionalProperties": False}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        token = {"name": "X-CommitMQ-Token", "in": "header", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [
            *parameters,
            {**token, "description": "That of GET /api/v1/session, with its cookie."},
        ]
    return operation


def _asked(kind: Kind, field: dataclasses.Field[Any]) -> dict[str, Any]:
    facts = field.metadata
    one: dict[str, Any] = {"type": _JSON_TYPES[kind.name]}
    if kind.name == "int":
        one |= {"minimum": facts["low"], "maximum": facts["high"]}
    elif kind.name == "str" and not kind.many:
        one |= {"enum": list(facts["choices"])} if facts["choices"] else {"maxLength": facts["longest"]}
    shown = {"type": "array", "items": one, "maxItems": facts["longest"]} if kind.many else one
    if field.default is not dataclasses.MISSING and field.default is not None:
        shown["default"] = field.default
    return {**shown, "description": facts["doc"]}


def _shape(annotation: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of an answer's type; dataclasses go into ``schemas``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, types.UnionType):
        return {"anyOf": [_shape(one, schemas) for one in arguments]}
    if annotation is type(None):
        return {"type": "null"}
    if annotation is Any:
        return {}
    if origin in (list, tuple):
        return {"type": "array", "items": _shape(arguments[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _shape(arguments[1], schemas)}
    if not dataclasses.is_dataclass(annotation):
        return {"type": _JSON_TYPES[annotation.__name__]}
    assert isinstance(annotation, type)
    name = annotation.__name__
    if name not in schemas:
        schemas[name] = {}  # it may name itself
        hints = typing.get_type_hints(annotation)
        properties = {one.name: _shape(hints[one.name], schemas) for one in dataclasses.fields(annotation)}
        schemas[name] = {
            "type": "object",
            "description": (annotation.__doc__ or "").partition("\n")[0],
            "properties": properties,
            "required": list(properties),
        }
    return {"$ref": f"#/components/schemas/{name}"}
