"""The table of all routes: what each takes, what it gives, whether it changes something, and how its page shows it.

The OpenAPI document of the routes, made from their dataclasses: what the server takes and gives is what it says.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from commitmq_plugins.dashboard.api import audit, dead_letters, groups, machine, messages, topics
from commitmq_plugins.dashboard.api.node import FieldType, VisitorNode, kind_of

ROOT: Final = "/api/v1"


@dataclass(frozen=True, slots=True)
class Route:
    """``work(node, asks)`` gives ``answers``: as a page at ``path`` with ``template``, and as JSON at ``api_path``. A path has
    names of the request's values in braces. A POST changes something. ``needs`` has sets of values: without all of one of
    them the page is a form, and asks the node nothing.
    """

    method: str
    path: str
    work: Callable[[VisitorNode, Any], Any]
    template: str
    summary: str
    needs: tuple[tuple[str, ...], ...] = ()

    @property
    def api_path(self) -> str:
        return ROOT + (self.path if self.path != "/" else "/overview")

    @property
    def asks(self) -> type[Any]:
        return _annotations(self.work)[1]

    @property
    def answers(self) -> type[Any]:
        return _annotations(self.work)[2]

    @property
    def picture(self) -> str:
        """Its name in the documentation's pictures: ``topics-topic-messages``."""
        return self.path.strip("/").translate({ord("{"): None, ord("}"): None, ord("/"): "-"}) or "overview"

    def is_only_a_form(self, given: Mapping[str, Sequence[Any]]) -> bool:
        """Whether a value is missing that an operator gives next."""
        if not self.needs:
            return False
        return not any(all(any(given.get(name, ())) for name in names) for names in self.needs)


@functools.cache
def _annotations(work: Callable[[VisitorNode, Any], Any]) -> list[type[Any]]:
    return list(typing.get_type_hints(work).values())


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
    Route("GET", "/", machine.overview, "overview.html", "The node in one answer"),
    Route("GET", "/topics", topics.topics, "topics.html", "Topics, 50 a page"),
    Route("POST", "/topics", topics.create_topic, "topic_made.html", "Create a topic"),
    Route("GET", "/topics/{topic}", topics.topic, "topic.html", "A topic and its queues"),
    Route(
        "GET", "/topics/{topic}/messages", messages.messages, "messages.html",
        "Messages of a topic: the newest, or from an offset or a time on",
    ),
    Route("POST", "/topics/{topic}/messages", messages.send_message, "sent.html", "Send a test message"),
    Route(
        "GET", "/messages/{id}", messages.message, "message.html",
        "A message by its id, or with its topic by its unique id",
    ),
    Route(
        "GET", "/search", messages.search, "search.html",
        "Messages by key, or one by its id", (("id",), ("topic", "key")),
    ),
    Route("GET", "/groups", groups.groups, "groups.html", "Groups, 50 a page"),
    Route("GET", "/groups/{group}", groups.group, "group.html", "A group by queues"),
    Route("GET", "/groups/{group}/reset", groups.preview_reset, "reset.html", "What a reset would do", (("to",),)),
    Route("POST", "/groups/{group}/reset", groups.reset, "reset.html", "Reset a group"),
    Route("GET", "/dlq", dead_letters.dead_groups, "dead_groups.html", "Groups with dead letters"),
    Route("GET", "/dlq/{group}", dead_letters.dead_letters, "dead_letters.html", "Dead letters of a group"),
    Route("POST", "/dlq/{group}/resend", dead_letters.resend, "resent.html", "Send a selection of dead letters again"),
    Route("GET", "/messages/{id}/trace", messages.trace, "trace.html", "The trace of a message"),
    Route("GET", "/delayed", dead_letters.delayed, "delayed.html", "Messages that wait for their time"),
    Route("GET", "/delayed/{handle}", dead_letters.preview_recall, "recall.html", "What a cancellation would do"),
    Route("POST", "/delayed/{handle}", dead_letters.recall, "recall.html", "Cancel a message that waits"),
    Route("GET", "/transactions", dead_letters.transactions, "transactions.html", "Transactions without an end"),
    Route("GET", "/transactions/{id}", dead_letters.preview_end, "transaction.html", "What an end would do"),
    Route(
        "POST", "/transactions/{id}", dead_letters.end_transaction, "transaction.html",
        "Commit or roll back a transaction manually",
    ),
    Route(
        "GET", "/topics/{topic}/tail", messages.tail, "tail.html",
        "The newest messages of a topic, and what is new since the look before",
    ),
    Route("GET", "/history", machine.node_history, "history.html", "Bytes a second that the node wrote"),
    Route("GET", "/topics/{topic}/history", machine.topic_history, "history.html", "Messages a second of a topic"),
    Route("GET", "/groups/{group}/history", machine.group_history, "history.html", "How far a group was behind"),
    Route("GET", "/clients", groups.clients, "clients.html", "Members and connections"),
    Route("GET", "/audit", audit.audit, "audit.html", "The audit log, the newest first"),
    Route("GET", "/processes", machine.processes, "processes.html", "The node's processes"),
    Route("GET", "/plugins", machine.plugins, "plugins.html", "Plugins and dispatchers"),
    Route("GET", "/storage", machine.storage, "storage.html", "The store's files"),
    Route("GET", "/users", machine.users, "users.html", "Users, without secrets"),
)  # fmt: skip


VERSION: Final = "1.0.0"
_JSON_TYPES: Final = {"str": "string", "int": "integer", "bool": "boolean", "float": "number"}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.api_path, {})[route.method.lower()] = _operation(route, schemas)
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


def _asked(kind: FieldType, field: dataclasses.Field[Any]) -> dict[str, Any]:
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
