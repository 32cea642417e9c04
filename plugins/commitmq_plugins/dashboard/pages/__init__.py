"""How the dashboard looks: templates without a script, made on the server.

Every value is text: markup in it is escaped, and characters that would hide or reorder it are named.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from commitmq_plugins.dashboard.guard import ONLY_SUPER, Rights

_FOLDER: Final = Path(__file__).parent
STYLE: Final = (_FOLDER / "style.css").read_bytes()
_STATUS: Final = ("admin", "status")
NAVIGATION: Final[tuple[tuple[str, str, tuple[str, str] | None], ...]] = (
    ("/", "Overview", _STATUS),
    ("/topics", "Topics", None),
    ("/search", "Search", None),
    ("/groups", "Groups", None),
    ("/dlq", "Dead letters", None),
    ("/delayed", "Delayed", _STATUS),
    ("/transactions", "Transactions", ("transaction", "transaction.list")),
    ("/clients", "Clients", None),
    ("/processes", "Processes", _STATUS),
    ("/plugins", "Plugins", _STATUS),
    ("/storage", "Storage", _STATUS),
    ("/users", "Users", ONLY_SUPER),
    ("/audit", "Audit", ONLY_SUPER),
)
"""Path, name, and the question that a visitor must be allowed to ask."""
UNKNOWN: Final = "–"
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400


class Renderer:
    """Thread-safe; templates are compiled at their first use."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
            # The last step before a value is escaped: also for one that a template shows without a filter.
            finalize=lambda value: visible(value) if type(value) is str else value,
        )
        self._environment.filters.update(
            age=age,
            body=body,
            figure=figure,
            number=number,
            part=part,
            query=query,
            size=size,
            time=time_of,
            maybe=maybe,
        )

    def page(self, template: str, values: dict[str, Any]) -> bytes:
        """The page as UTF-8."""
        text = self._environment.get_template(template).render(values)
        return text.encode(errors="backslashreplace")


def navigation(rights: Rights) -> list[tuple[str, str]]:
    """Path and name of the pages that a visitor may look at."""
    return [(path, name) for path, name, question in NAVIGATION if question is None or rights.may(*question)]


def visible(text: str) -> str:
    """With control characters, and those that reorder or hide text, as ``\\u202e``."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def body(text: str) -> str:
    """:func:`visible` for a body: its lines stay lines."""
    return Markup("\n").join(escape(visible(line)) for line in text.expandtabs(4).split("\n"))


def maybe(value: object) -> object:
    """A dash for what is not known: never 0, never nothing."""
    return UNKNOWN if value is None or value == "" else value


def number(value: float | None) -> str:
    """With commas."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Bytes in the largest binary unit that keeps a digit before the point."""
    if value is None:
        return UNKNOWN
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def figure(value: float | None, unit: str) -> str:
    """A figure of a history."""
    if unit == "bytes/s":
        return size(value)
    if value is None:
        return UNKNOWN
    return f"{value:,.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"


def age(seconds: float | None) -> str:
    """``3 min``; a dash when not known."""
    if seconds is None:
        return UNKNOWN
    for length, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {name}"
    return f"{seconds:,.1f} s" if 0 < seconds < 10 else f"{seconds:,.0f} s"


def time_of(milliseconds: int | None) -> str:
    """Milliseconds since 1970 in UTC; a dash when not known or out of range."""
    if milliseconds is None or milliseconds <= 0:
        return UNKNOWN
    try:
        when = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, OSError, ValueError):
        return f"{milliseconds} ms"
    return f"{when:%Y-%m-%d %H:%M:%S}.{milliseconds % 1000:03d}"


def part(name: str) -> str:
    return quote(name, safe="", errors="surrogatepass")


def query(values: dict[str, Any], **more: Any) -> str:
    """The query of a link: the values of this page with others; without those that are None or empty."""
    kept = {name: one for name, one in {**values, **more}.items() if one not in (None, "", False)}
    return urlencode(kept, errors="surrogatepass")
