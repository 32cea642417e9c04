"""Goal: whatever a name or a body holds, a page shows it as text, and shows what is not known as a dash.

Method: the filters by themselves; every template with hostile values in every place, read by an HTML parser.
"""

from __future__ import annotations

import dataclasses
import typing
from html.parser import HTMLParser
from pathlib import Path
from types import UnionType
from typing import Any

import pytest

from commitmq.log import get_log
from commitmq.security.access_file import AccessTable
from commitmq.security.audit import Actor, AuditLimits, AuditLog
from commitmq.security.policy import Policies, PolicyEntry, ResourcePattern, Secret, User, parse_actions
from commitmq_plugins.dashboard import pages
from commitmq_plugins.dashboard.api.routes import ROUTES, Route
from commitmq_plugins.dashboard.guard import NotAllowedError, Rights

HOSTILE = "<script>x()</script>\"' onload=x {{ 7*7 }} {% raw %} \u202e\x00\x1b[31m javascript:x </textarea></title>"


def test_figures() -> None:
    assert [pages.size(one) for one in (None, 0, 1023, 1024, 1536, 5 << 40)] == [
        "–", "0 B", "1,023 B", "1.0 KiB", "1.5 KiB", "5.0 TiB",
    ]  # fmt: skip
    assert [pages.age(one) for one in (None, 0.0, 2.5, 90, 300, 7_200, 400_000)] == [
        "–", "0 s", "2.5 s", "90 s", "5 min", "2 h", "5 d",
    ]  # fmt: skip
    assert [pages.number(one) for one in (None, 0, 1_234_567)] == ["–", "0", "1,234,567"]
    assert pages.time_of(1_780_315_200_007) == "2026-06-01 12:00:00.007"
    assert pages.time_of(1 << 62) == f"{1 << 62} ms"
    assert [pages.time_of(one) for one in (None, 0, -1)] == ["–"] * 3
    assert [pages.maybe(one) for one in (None, "", 0, "x")] == ["–", "–", 0, "x"]


def test_characters_that_hide_are_named() -> None:
    assert pages.visible("a\u202eb\x00c\nd") == "a\\u202eb\\x00c\\nd"
    assert pages.visible("küche 厨房") == "küche 厨房"
    assert str(pages.body("a\n<b>\u202e\r\n")) == "a\n&lt;b&gt;\\u202e\\r\n"
    assert pages.part("%DLQ%a/b?c") == "%25DLQ%25a%2Fb%3Fc"
    assert pages.query({"a": "x&y", "b": "", "c": None}, page=2) == "a=x%26y&page=2"


def everybody(user: str | None = None, *entries: str) -> dict[str, Any]:
    """What all pages have: for a visitor who may do everything, or for a user with these entries, ``Topic:a Pub,Sub``."""
    table = AccessTable()
    if user is not None:
        table.users[user] = User(user, Secret.make())
        parts = [one.split(" ") for one in entries]
        found = [
            PolicyEntry(ResourcePattern.parse(what), parse_actions(does.split(",")), (), True) for what, does in parts
        ]
        table.policies[user] = Policies(tuple(found))
    audit = AuditLog(Path("/nowhere"), "test", get_log("test"), AuditLimits(enable=False))
    rights = Rights(Actor(user or HOSTILE, "dashboard", "127.0.0.1"), user, table, "DefaultCluster", audit)
    shown = {"visitor": rights, "navigation": pages.navigation(rights), "can_log_out": True}
    return {"token": "t", "problems": [], **shown}


def made(annotation: Any, depth: int = 0) -> Any:
    """A value of a type, hostile where it is a text; lists have two entries."""
    if isinstance(annotation, UnionType):
        return made(typing.get_args(annotation)[0], depth)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return [made(arguments[0], depth + 1) for _ in range(2)]
    if origin is dict:
        return {made(arguments[0]): made(arguments[1])}
    if dataclasses.is_dataclass(annotation):
        assert isinstance(annotation, type)
        hints = typing.get_type_hints(annotation)
        return annotation(**{one.name: made(hints[one.name], depth + 1) for one in dataclasses.fields(annotation)})
    return {str: HOSTILE, int: 7, float: 7.5, bool: True}[annotation]


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def elements(html: str) -> Elements:
    parser = Elements()
    parser.feed(html)
    return parser


@pytest.mark.parametrize("page", ROUTES, ids=lambda page: f"{page.method} {page.path}")
def test_no_value_becomes_markup(page: Route) -> None:
    asked = {one.name: HOSTILE for one in dataclasses.fields(page.asks)}
    common = {**everybody(), "problems": [HOSTILE], "asked": asked}
    html = pages.Renderer().page(page.template, {**common, "data": made(page.answers)}).decode()
    found = elements(html)
    assert not {"script", "img", "iframe", "object", "style", "foreignobject"} & set(found.tags)
    assert ("svg" in found.tags) == (page.template == "history.html")
    assert found.tags.count("title") == found.tags.count("h1") == found.tags.count("main") == 1
    assert found.tags.count("table") == found.tags.count("caption")
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("style", "srcdoc")]
    places = [value for name, value in found.attributes if name in ("href", "action", "src")]
    assert [one for one in places if one[:1] not in ("/", "#")] == []
    assert "\u202e" not in html
    assert "\x00" not in html
    assert ">49<" not in html


@pytest.mark.parametrize("page", [one for one in ROUTES if one.needs], ids=lambda page: page.path)
def test_a_form_alone(page: Route) -> None:
    asked = {one.name: "" for one in dataclasses.fields(page.asks)}
    values: dict[str, Any] = {**everybody(), "asked": asked, "data": None}
    assert "<form" in pages.Renderer().page(page.template, values).decode()


def test_nothing_is_unknown_in_a_sparse_answer() -> None:
    """Every value that may be null is null: a dash, never 0, and no template fails."""

    def sparse(annotation: Any) -> Any:
        if isinstance(annotation, UnionType):
            return None
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            hints = typing.get_type_hints(annotation)
            return annotation(**{one.name: sparse(hints[one.name]) for one in dataclasses.fields(annotation)})
        if typing.get_origin(annotation) is list:
            return [sparse(typing.get_args(annotation)[0])]
        if typing.get_origin(annotation) is dict:
            return {}
        return {str: "x", int: 0, float: 0.0, bool: False}[annotation]

    for page in ROUTES:
        asked = {one.name: "" for one in dataclasses.fields(page.asks)}
        values = {**everybody(), "asked": asked, "data": sparse(page.answers)}
        html = pages.Renderer().page(page.template, values).decode()
        assert "None" not in html, page.path


def test_a_user_is_shown_what_the_policies_allow() -> None:
    rights: Rights = everybody("shop", "Topic:orders Pub,Sub", "Group:desk Sub")["visitor"]
    assert [path for path, _ in pages.navigation(rights)] == ["/topics", "/search", "/groups", "/dlq", "/clients"]
    assert rights.sees_topic("orders")
    assert rights.reads_topic("orders")
    assert rights.reads_topic("%RETRY%desk")
    assert rights.sees_group("desk")
    assert not rights.sees_topic("ledger")
    assert not rights.sees_group("cooks")
    assert not rights.may_create
    assert not rights.may_resend("desk")
    assert everybody("maker", "Topic:tmp-* Create")["visitor"].may_create
    assert not everybody("maker", "Group:* Create")["visitor"].may_create
    watcher: Rights = everybody("watcher", "Cluster:* Get")["visitor"]
    assert ("/", "Overview") in pages.navigation(watcher)
    assert ("/users", "Users") not in pages.navigation(watcher)
    for role, op, fields in (
        ("coordinator", "topic.create", {"topic": "orders"}),
        ("reader-0", "pull", {"topic": "ledger"}),
        ("admin", "status", {}),
        ("coordinator", "offset.commit", {"group": "desk", "reset": True, "offsets": [["orders", 0, 0]]}),
    ):
        with pytest.raises(NotAllowedError):
            rights.check(role, op, fields)
    rights.check("reader-0", "pull", {"topic": "orders"})


def test_the_login_page_is_text_too() -> None:
    for takes_secret in (True, False):
        values = {**everybody(), "visitor": None, "text": HOSTILE, "takes_secret": takes_secret}
        found = elements(pages.Renderer().page("login.html", values).decode())
        assert ("form" in found.tags) == takes_secret
        assert "script" not in found.tags
