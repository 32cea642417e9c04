"""``commitmq audit``: who changed what, who was refused, and whether the log of that is whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli import options
from commitmq.cli.options import json_option
from commitmq.cli.output import complain, print_json
from commitmq.cli.quantity import seconds
from commitmq.cli.shown_changes import change_text
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.security.audit_trail import AuditTrail, Chain

_LAST = 1_000


@click.command()
@options.store_option("The store, whether a node runs on it or not.")
@click.option("--since", "since_s", metavar="TIME", type=seconds(), help="Only of so long ago and later, as in 1h.")
@click.option("--user", metavar="NAME", help="Only of this user; 'uid 1000' is an account of the machine.")
@click.option("--op", "operation", metavar="NAME", help="Only this operation, or all that begin so, as in topic.")
@click.option("--resource", metavar="TYPE:NAME", help="Only this resource, as in Topic:orders.")
@click.option("--refused", is_flag=True, help="Only refused requests.")
@click.option(
    "--last", "most", type=click.IntRange(0), default=_LAST, show_default=True, help="Lines at most; 0 for all."
)
@click.option("--verify", is_flag=True, help="Say whether lines are missing or were changed; exits 65 then.")
@json_option
def audit(
    store: Path,
    since_s: float | None,
    user: str | None,
    operation: str | None,
    resource: str | None,
    refused: bool,
    most: int,
    verify: bool,
    as_json: bool,
) -> None:
    """Show who changed what, and who was refused.

    The oldest line comes first. A change has its values in brackets, before -> after, shortened; --json has them whole, one
    object a line. Users leave a line too when they use a topic or a group for the first time in an hour. --verify prints the
    digest of each file's last line: only who keeps that elsewhere can see that lines at the end were cut off.

    \b
    Example: commitmq audit --store /var/lib/commitmq/main --since 1h --user shop
    """
    from commitmq.security.audit_trail import AuditTrail
    from commitmq.store.access import require_store_or_new
    from commitmq.store.layout import StoreLayout

    layout = StoreLayout(store)
    require_store_or_new(layout)
    trail = AuditTrail(layout.audit)
    if verify:
        _verify(trail.verified(), as_json)
        return
    wanted = {"user": user, "resource": resource, "decision": "refused" if refused else None}
    found: Iterator[dict[str, Any]] | deque[dict[str, Any]] = _matching(trail, _time(since_s), wanted, operation)
    for line in deque(found, most) if most else found:
        if as_json:
            print_json(line)
        else:
            click.echo(_shown(line))
    if trail.unreadable:
        complain(f"{trail.unreadable} pieces of the audit log are no lines; --verify tells where")


def _time(since_s: float | None) -> str:
    """The time of this many seconds ago, as in a line; empty for none."""
    import time

    return "" if since_s is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - since_s))


def _matching(
    trail: AuditTrail, since: str, wanted: dict[str, str | None], operation: str | None
) -> Iterator[dict[str, Any]]:
    for line in trail.lines(since):
        op = str(line.get("op", ""))
        if operation is not None and op != operation and not op.startswith(f"{operation.rstrip('.')}."):
            continue
        if all(value is None or line.get(name) == value for name, value in wanted.items()):
            yield line


def _shown(line: dict[str, Any]) -> str:
    who = f"{line.get('user') or '-'}@{line.get('address') or '-'}"
    parts = [line["time"], line["role"], who, line.get("decision", ""), line.get("op", ""), line.get("resource", "")]
    if changed := change_text(line.get("before"), line.get("after")):
        parts.append(f"[{changed}]")
    if line.get("reason"):
        parts.append(f"({line['reason']})")
    # Names are a client's own: a terminal must not obey them.
    return "  ".join(_plain(str(one)) for one in parts if one)


def _plain(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def _verify(chains: list[Chain], as_json: bool) -> None:
    is_whole = not any(one.faults for one in chains)
    if as_json:
        print_json({"whole": is_whole, "chains": [one.to_json() for one in chains]})
    elif not chains:
        click.echo("the store has no audit log")
    else:
        for one in chains:
            click.echo(f"{one.role}: {one.lines} lines, {one.first} to {one.last}, the last has the digest {one.head}")
            for sentence in one.notes:
                click.echo(f"  {sentence}")
            for sentence in one.faults:
                click.secho(f"  FAULT: {sentence}", fg="red")
        click.echo("every line is in its place" if is_whole else "LINES ARE MISSING OR WERE CHANGED")
    if not is_whole:
        raise SystemExit(int(CliExit.DAMAGE_FOUND))
