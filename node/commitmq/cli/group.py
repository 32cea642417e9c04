"""``commitmq group list|lag|describe|members|pop|create|delete|reset|clone|config``: the consumer groups of a running node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from commitmq.cli.group_lag import lag
from commitmq.cli.group_members import members, pop, show_plan
from commitmq.cli.group_reset import clone, reset
from commitmq.cli.output import ask_before, json_option, node_option, print_json, print_table, yes_option
from commitmq.cli.progress import count_progress
from commitmq.cli.quantity import long

if TYPE_CHECKING:
    from commitmq.client.admin import Admin


@click.group()
def group() -> None:
    """List consumer groups and their lag, describe one, make or delete one, reset its offsets."""


for _command in (lag, members, pop, reset, clone):
    group.add_command(_command)


@group.command(name="list")
@click.option("--all", "with_system", is_flag=True, help="Also the groups of RocketMQ's and the node's own parts.")
@click.option("--lag", "with_lag", is_flag=True, help="Also how many messages each is behind.")
@json_option
@node_option
def list_(with_system: bool, with_lag: bool, as_json: bool, node: str) -> None:
    """List the groups with their members and the topics they have consumed.

    --lag asks the node for each group and for each of its topics. `group lag` shows the queues of one group.

    \b
    Example: commitmq group list --lag
    """
    from commitmq.client.admin import Admin
    from commitmq.store.metadata.topic_name import is_system_group

    with Admin(node) as admin:
        groups = [one for one in admin.groups() if with_system or not is_system_group(one["name"])]
        if with_lag:
            with count_progress("groups", quiet=as_json) as progress:
                for number, one in enumerate(groups, 1):
                    one["lag"] = _lag_of(admin, one["name"])
                    progress(number, len(groups))
    if as_json:
        print_json(groups)
    elif not groups:
        click.echo("no groups")
    else:
        headers = ("GROUP", "MEMBERS", *(("LAG",) if with_lag else ()), "TOPICS")
        rows = [
            (one["name"], one["members"], *((one["lag"],) if with_lag else ()), ", ".join(one["topics"]) or "-")
            for one in groups
        ]
        print_table(headers, rows, left=(0, len(headers) - 1))


def _lag_of(admin: Admin, group: str) -> int:
    from commitmq.errors import GroupNotFoundError

    try:
        return sum(one.lag for one in admin.group_lag(group))
    except GroupNotFoundError:
        return 0  # it was deleted meanwhile


@group.command()
@click.argument("name")
@click.option(
    "--plan", "planned", type=click.IntRange(1, 10_000), metavar="N", help="Show how N members would share the queues."
)
@json_option
@node_option
def describe(name: str, planned: int | None, as_json: bool, node: str) -> None:
    """Show the members of group NAME, the queues of each, and the committed offsets.

    --plan changes nothing. Its members are those that the group has, then new ones, and they share by the group's strategy.

    \b
    Example: commitmq group describe kitchen --plan 4
    """
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        if planned is not None:
            show_plan(name, admin.group_plan(name, planned), as_json)
            return
        described = admin.group(name)
    if as_json:
        print_json(described)
        return
    click.echo(f"group {name}  {described['state']}")
    if described["members"]:
        print_table(
            ("MEMBER", "TOPICS", "QUEUES", "HEARD MS AGO"),
            [
                (one["member"], ", ".join(one["topics"]), len(one["queues"]), one["heard_ms_ago"])
                for one in described["members"]
            ],
            left=(0, 1),
        )
    holders = {(topic, queue): member for topic, queue, member in described["queues"]}
    committed = {(topic, queue): offset for topic, queue, offset in described["offsets"]}
    rows = [
        (topic, queue, committed.get((topic, queue), "-"), holders.get((topic, queue), "-"))
        for topic, queue in sorted({*holders, *committed})
    ]
    if rows:
        print_table(("TOPIC", "QUEUE", "COMMITTED", "MEMBER"), rows, left=(0, 3))


@group.command()
@click.argument("name")
@click.option("--set", "pairs", metavar="SETTING=VALUE", multiple=True, help="With this setting; may be repeated.")
@json_option
@node_option
def create(name: str, pairs: tuple[str, ...], as_json: bool, node: str) -> None:
    """Create group NAME. One that exists with the same settings is no error.

    Settings are those of `group config`. A node with groups.auto_create=false serves only groups that were made so.

    \b
    Example: commitmq group create kitchen --set retryMaxTimes=3
    """
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        created = admin.group_create(name, dict(_setting(pair) for pair in pairs))
        settings = admin.group_config(name)
    if as_json:
        print_json({"created": created, "config": settings})
    else:
        click.echo(f"group {name} {'created' if created else 'exists already'}")


@group.command()
@click.argument("name")
@click.option(
    "--offsets", is_flag=True, help="Also its committed offsets; without them it goes on there if it comes again."
)
@click.option("--force", is_flag=True, help="Also while it has consumers; these make the group again.")
@yes_option
@json_option
@node_option
def delete(name: str, offsets: bool, force: bool, yes: bool, as_json: bool, node: str) -> None:
    """Delete group NAME: its settings, and with --offsets its committed offsets.

    With its offsets the group stays in `group list`. Its retry and dead-letter topics stay too; `topic delete` deletes them.

    \b
    Example: commitmq group delete kitchen --offsets --yes
    """
    from commitmq.client.admin import Admin
    from commitmq.errors import GroupNotFoundError

    ask_before(f"delete group {name} with its offsets" if offsets else f"delete group {name}", yes)
    with Admin(node) as admin:
        admin.group_delete(name, offsets=offsets, force=force)
        try:
            kept = len(admin.group(name)["offsets"])
        except GroupNotFoundError:
            kept = 0
    if as_json:
        print_json({"deleted": name, "offsets": offsets, "kept_offsets": kept})
    elif kept and not offsets:
        click.echo(f"the settings of group {name} are deleted")
        click.echo(
            f"its committed offsets in {kept} queues stay, and so it is still listed: "
            f"`commitmq group delete {name} --offsets` deletes them"
        )
    else:
        click.echo(f"group {name} deleted{', and its offsets' if offsets else ''}")


@group.command()
@click.argument("name")
@click.option("--set", "pairs", metavar="SETTING=VALUE", multiple=True, help="Change this setting; may be repeated.")
@json_option
@node_option
def config(name: str, pairs: tuple[str, ...], as_json: bool, node: str) -> None:
    """Show or change the settings of group NAME, under RocketMQ's names.

    consumeEnable=false switches a group off. --set makes a group that does not exist.
    """
    from commitmq.client.admin import Admin

    changes = dict(_setting(pair) for pair in pairs)
    with Admin(node) as admin:
        settings = admin.group_config(name, changes or None)
    if as_json:
        print_json(settings)
        return
    rows = [(setting, _json(value)) for setting, value in settings.items() if setting != "groupName"]
    print_table(("SETTING", "VALUE"), rows, left=(0, 1))


def _setting(pair: str) -> tuple[str, object]:
    """A setting and its value from SETTING=VALUE. Raises BadParameter."""
    name, separator, value = pair.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{pair!r}: write SETTING=VALUE", param_hint="--set")
    if value in ("true", "false"):
        return name, value == "true"
    return name, long(value, "--set") if value.isascii() and value.isdigit() else value


def _json(value: object) -> str:
    """``value`` as JSON."""
    import orjson

    return orjson.dumps(value).decode()
