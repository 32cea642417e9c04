"""The OpenAPI document of the routes, made from their dataclasses: what the server takes and gives is what it says."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any, Final

from commitmq_plugins.dashboard.api.routes import Route
from commitmq_plugins.dashboard.api.values import Kind, kind_of

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
