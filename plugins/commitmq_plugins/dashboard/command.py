"""``commitmq dashboard``: where the dashboard of a running node is, with a link to log in where it asks for one."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.options import json_option, node_option
from commitmq.cli.output import fail, print_json
from commitmq.supervision.exit_codes import CliExit


@click.command()
@click.option("--user", metavar="NAME", default="", help="A link that logs in as this user of the node.")
@json_option
@node_option
def dashboard(user: str, as_json: bool, node: str) -> None:
    """Show the address of a node's dashboard.

    The node runs it with `commitmq start --set plugins.dashboard.enable=true`. For a node with users or keys the address is
    a link that logs you in, once, within a minute; only the account that owns the store gets one. Whoever uses the link acts
    as that account, which may do everything, or as the user that --user names.

    \b Example: commitmq dashboard --node tcp://127.0.0.1:7310
    """
    from commitmq.client.admin import Admin
    from commitmq.security.access_file import AccessFile
    from commitmq_plugins.dashboard.guard import make_link

    with Admin(node) as admin:
        status = admin.status()
    rows = [row for row in status["processes"] if row["role"] == "worker-dashboard"]
    addresses = [str(one) for row in rows for one in row["endpoints"] or ()]
    if not addresses:
        why = (
            "it has not started yet; `commitmq status` says why"
            if rows
            else "start with --set plugins.dashboard.enable=true"
        )
        fail(f"this node has no dashboard: {why}", CliExit.FAILURE)
    [address, *_] = addresses
    store = Path(status["node"]["store"])
    table = AccessFile(store).load()
    asks = bool(rows[0]["info"].get("has_keys")) or not table.is_open
    if user and (user not in table.users or not table.users[user].is_enabled):
        fail(f"there is no enabled user {user!r:.200}: `commitmq user list` shows all", CliExit.FAILURE)
    link = address
    if asks:
        folder = store / "commitmq" / "workers" / "dashboard"
        link = f"{address}/login?link={make_link(folder, user)}"
    if as_json:
        print_json({"address": address, "asks_for_login": asks, "link": link})
        return
    click.echo(link)
