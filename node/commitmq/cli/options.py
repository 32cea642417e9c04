"""The options that several verbs share, each with its one name, default and sentence; and the folder of a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from commitmq.cli.quantity import seconds

if TYPE_CHECKING:
    from commitmq.client.admin import Admin

_Function = TypeVar("_Function", bound=Callable[..., Any])

DEFAULT_NODE: Final = "tcp://127.0.0.1:7310"
_USUAL_WATCH_S: Final = 2.0


def _admin_of(context: click.Context, _parameter: click.Parameter, node: str) -> Admin | None:
    """The admin of the node; the end of the verb closes it."""
    if context.resilient_parsing:
        return None  # a shell completes words
    from commitmq.client.admin import Admin

    return context.with_resource(Admin(node))


_ADDRESS: Final[dict[str, Any]] = {
    "metavar": "ADDRESS",
    "default": DEFAULT_NODE,
    "show_default": True,
    "envvar": "COMMITMQ_NODE",
    "help": "Admin address of the node.",
}
node_option = click.option("--node", **_ADDRESS)
"""The parameter is called ``node``."""

admin_option = click.option("--node", "admin", callback=_admin_of, **_ADDRESS)
"""The parameter is called ``admin``, a :class:`commitmq.Admin` of the node."""

node_or_none_option = click.option(
    "--node", metavar="ADDRESS", envvar="COMMITMQ_NODE", help=f"Admin address.  [default: {DEFAULT_NODE}]"
)
"""``node`` is None where nobody gave one: the verb also takes a store."""

running_store_option = click.option(
    "--store", type=click.Path(path_type=Path, file_okay=False), help="Store folder of a node here."
)
"""The parameter is called ``store``."""

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
"""For :func:`commitmq.cli.output.ask_before`."""

watch_option = click.option(
    "--watch",
    "every_s",
    type=seconds(),
    is_flag=False,
    flag_value=_USUAL_WATCH_S,
    metavar="[SECONDS]",
    help=f"Look again and again until Ctrl-C, every SECONDS.  [without a number: {_USUAL_WATCH_S:g}]",
)
"""The parameter is called ``every_s``, None without ``--watch``."""

folder_argument = click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
"""The folder of a store, which exists."""


def timeout_option(
    default_s: float = 10.0, text: str = "Seconds to wait.", *, least_s: float = 0.0
) -> Callable[[_Function], _Function]:
    """``--timeout``; the parameter is called ``timeout_s``."""
    return click.option(
        "--timeout", "timeout_s", type=seconds(least_s), default=default_s, show_default=True, help=text
    )


def dry_run_option(text: str = "Only say what would change.") -> Callable[[_Function], _Function]:
    """``--dry-run``."""
    return click.option("--dry-run", is_flag=True, help=text)


def store_option(text: str, *, exists: bool = True) -> Callable[[_Function], _Function]:
    """A ``--store`` that a verb cannot do without."""
    kind = click.Path(exists=exists, path_type=Path, file_okay=False)
    return click.option("--store", required=True, type=kind, help=text)


def in_turn(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """One decorator that adds ``options``, in the order of the help."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


config_options = in_turn(
    click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of keys."),
    click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable."),
)
"""The parameters are called ``config_file`` and ``overrides``."""

admin_options = in_turn(json_option, admin_option)
"""Those of a verb that asks a node: ``as_json`` and ``admin``."""

node_options = in_turn(node_or_none_option, running_store_option, timeout_option())
"""Those of a verb that asks a node's supervisor: ``node``, ``store`` and ``timeout_s``."""
