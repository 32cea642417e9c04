"""``commitmq group list|lag|describe|members|pop|create|delete|reset|clone|config``: the consumer groups of a running
node.

``commitmq group lag``: how far a group is behind, once or again and again.

``commitmq group members|pop``: who reads for a group, and what its consumers have in flight.

``commitmq group reset|clone``: where a group continues.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.client_questions import GATEWAY, NO_QUESTIONS, Questions, question_options
from commitmq.cli.options import admin_options, dry_run_option, json_option, node_option, watch_option, yes_option
from commitmq.cli.output import (
    ask_before,
    complain,
    count_progress,
    looks,
    new_page,
    print_either,
    print_json,
    print_table,
)
from commitmq.cli.quantity import MAX_INT, MAX_LONG, long, parse_position
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.client.admin import Admin
    from commitmq.client.admin_results import Lag


@click.command()
@click.argument("name")
@click.option(
    "--min",
    "least",
    type=click.IntRange(0, MAX_LONG),
    default=0,
    metavar="N",
    help="Show only queues where it is at least N messages behind, and those with a problem.",
)
@watch_option
@admin_options
def lag(name: str, least: int, every_s: float | None, as_json: bool, admin: Admin) -> None:
    """Show how far group NAME is behind in every queue that it has consumed.

    The sum counts all queues, also those that --min hides. Watched output that is not a terminal gets one page after the
    other; --json a line for each look.

    \b
    Example: commitmq group lag kitchen --min 1 --watch 5
    """
    for _ in looks(every_s):
        rows = admin.group_lag(name)
        total = sum(row.lag for row in rows)
        shown = [row for row in rows if row.lag >= least or row.problem]
        if as_json:
            print_json({"group": name, "lag": total, "queues": shown})
            continue
        if every_s is not None:
            new_page()
        _show(name, total, shown)


def _show(name: str, total: int, rows: list[Lag]) -> None:
    if rows:
        print_table(
            ("TOPIC", "QUEUE", "COMMITTED", "NEXT OFFSET", "LAG", "MEMBER"),
            [(row.topic, row.queue, row.committed, row.end, row.lag, row.member or "-") for row in rows],
            left=(0, 5),
        )
    click.echo(f"group {name} is {total} messages behind")
    for row in rows:
        if row.problem:
            click.echo(f"{row.topic} queue {row.queue}: {row.problem}")


@click.command()
@click.argument("name")
@click.option("--stack", is_flag=True, help="Instead, the stack of each member that is a client of RocketMQ.")
@question_options
@json_option
@node_option
def members(
    name: str, stack: bool, access_key: str | None, tls: bool, timeout_s: float, as_json: bool, node: str
) -> None:
    """Show the members of group NAME: where each is, what it reads, and when it was heard last.

    ADDRESS is that of the member's connection, or on the node's host its process. A client of RocketMQ comes through the
    node's broker process; its own address begins its name. Consumers that share queues are no members: `group pop`.

    With --stack the node's RocketMQ server asks each client what its threads do. The exit code is 1 when one does not tell.

    \b
    Example: commitmq group members kitchen --stack
    """
    from commitmq.client.admin import Admin

    if not stack and (access_key is not None or tls):
        raise click.UsageError("--access-key and --tls are for --stack")
    with Admin(node) as admin:
        described = admin.group(name)
        if stack:
            asked = {"access_key": access_key, "tls": tls, "timeout_s": timeout_s}
            _show_stacks(name, _stacks(admin, node, name, asked), as_json)
            return
    found = described["members"]
    if as_json:
        print_json({"group": name, "state": described["state"], "strategy": described["strategy"], "members": found})
        return
    if not found:
        click.echo(f"group {name} has no members")
        return
    print_table(
        ("MEMBER", "ADDRESS", "TOPICS", "QUEUES", "HEARD MS AGO"),
        [
            (
                one["member"],
                one["address"] or "-",
                ", ".join(one["topics"]),
                _queues(one["queues"]),
                one["heard_ms_ago"],
            )
            for one in found
        ],
        left=(0, 1, 2, 3),
    )
    click.echo(f"group {name} is {described['state']}; its members share queues by {described['strategy']}")


def _stacks(admin: Any, node: str, group: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each client that consumes in ``group``."""
    connected = admin.clients(group=group)
    if not connected.complete:
        complain(f"not every client of group {group} may be asked: the node keeps groups.max_listed_clients clients")
    gateways = {one.id: one.gateway for one in connected.clients if group in one.consumes}
    ids = [one for one, gateway in gateways.items() if gateway == GATEWAY]
    told = Questions(admin, node, **asked).stacks(group, ids) if ids else []
    found = dict(zip(ids, told, strict=True))
    rows = []
    for client_id, gateway in gateways.items():
        text, error = found.get(client_id, (None, NO_QUESTIONS))
        rows.append({"client": client_id, "gateway": gateway, "stack": text, "error": error})
    return rows


def _show_stacks(group: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"group": group, "clients": rows})
    elif not rows:
        click.echo(f"group {group} has no members")
    for one in () if as_json else rows:
        if one["stack"] is not None:
            click.echo(f"client {one['client']}\n{one['stack'].rstrip()}\n")
    for one in rows:
        if one["error"] is not None:
            complain(f"client {one['client']}: {one['error']}")
    if any(one["error"] is not None for one in rows):
        raise SystemExit(int(CliExit.FAILURE))


@click.command()
@click.argument("name")
@admin_options
def pop(name: str, as_json: bool, admin: Admin) -> None:
    """Show what the consumers of group NAME that share queues have in flight.

    These are messages that they received and did not acknowledge. The last line tells for all groups how far the node is
    with messages that nobody acknowledged.

    \b
    Example: commitmq group pop kitchen --json
    """
    found = admin.group_in_flight(name)
    if as_json:
        print_json({"group": name, **found})
        return
    if found["queues"]:
        rows = [(topic, stored, queue, count) for topic, stored, queue, count in found["queues"]]
        print_table(("TOPIC", "STORED IN", "QUEUE", "IN FLIGHT"), rows, left=(0, 1))
    click.echo(f"group {name} has {found['messages']} messages in flight")
    revive = found["revive"]
    late = f", the first is {revive['late_ms']} ms overdue" if revive["late_ms"] else ""
    click.echo(f"{revive['topic']}: {revive['unread']} records unread, {revive['waiting']} check points wait{late}")


def show_plan(name: str, plan: dict[str, Any], as_json: bool) -> None:
    """The answer of :meth:`commitmq.Admin.group_plan` for group ``name``."""
    if as_json:
        print_json({"group": name, **plan})
        return
    rows = [(member, topic, len(queues), _ranges(queues) or "-") for member, topic, queues in plan["shares"]]
    print_table(("MEMBER", "TOPIC", "COUNT", "QUEUES"), rows, left=(0, 1, 3))
    click.echo(f"by the strategy {plan['strategy']}")


def _queues(queues: list[list[Any]]) -> str:
    """Queues by topic: ``orders 0-3, prices 1``."""
    by_topic: dict[str, list[int]] = {}
    for topic, queue in queues:
        by_topic.setdefault(topic, []).append(queue)
    return ", ".join(f"{topic} {_ranges(sorted(found))}" for topic, found in sorted(by_topic.items())) or "-"


def _ranges(numbers: list[int]) -> str:
    """Numbers in rising order as ``0-3 5 7-8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


@click.command()
@click.argument("name")
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@click.option(
    "--to",
    "position",
    metavar="earliest|latest|TIME|OFFSET",
    help="Where the group continues: TIME is ISO 8601 (UTC without an offset), OFFSET a queue offset.",
)
@click.option("--shift", type=int, metavar="±N", help="N messages ahead in each queue, or with a minus back.")
@click.option("--copy-from", "other", metavar="GROUP", help="Where this group is, also back.")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the JSON of a reset or a describe was.",
)
@click.option(
    "--queue", "queues", type=click.IntRange(0, MAX_INT), multiple=True, help="Only this queue; may be repeated."
)
@dry_run_option("Only say where the group would continue.")
@admin_options
def reset(
    name: str,
    topics: tuple[str, ...],
    position: str | None,
    shift: int | None,
    other: str | None,
    path: Path | None,
    queues: tuple[int, ...],
    dry_run: bool,
    as_json: bool,
    admin: Admin,
) -> None:
    """Set the committed offsets of group NAME, back or ahead, in the given topics or in all that it reads.

    Give one of --to, --shift, --copy-from and --file. Members may run: each continues at its new offsets with its next
    heartbeat. --file takes what `group describe --json` wrote before, so that the group can go back there.

    \b
    Example: commitmq group reset kitchen orders --shift -100 --dry-run
    """
    from commitmq.errors import GroupNotFoundError

    if sum(one is not None for one in (position, shift, other, path)) != 1:
        raise click.UsageError("give one of --to, --shift, --copy-from and --file")
    target = None if position is None else parse_position(position, "--to")
    of_file = None if path is None else _offsets_in(path)
    try:
        before = {(topic, queue): offset for topic, queue, offset in admin.group(name)["offsets"]}
    except GroupNotFoundError:
        if shift is not None or (target is not None and not topics):
            raise
        before = {}
    try:
        if target is not None:
            stored = admin.reset_offsets(
                name, topics or None, target, queues=list(queues) or None, running=True, dry_run=dry_run
            )
        else:
            if shift is not None:
                offsets = [(*queue, max(0, min(offset + shift, MAX_LONG))) for queue, offset in before.items()]
            else:
                offsets = of_file if of_file is not None else admin.group(str(other))["offsets"]
            chosen = _chosen(offsets, topics, queues)
            stored = admin.set_offsets(name, chosen, running=True, dry_run=dry_run, copied_from=other)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--queue") from None
    if as_json:
        moved = [[*one, before.get(one[:2])] for one in stored]
        print_json(
            {"group": name, "dry_run": dry_run, "offsets": [one[:3] for one in moved], "before": [x[3] for x in moved]}
        )
        return
    rows = [(one.topic, one.queue, before.get(one[:2], "-"), one.offset) for one in stored]
    print_table(("TOPIC", "QUEUE", "BEFORE", "WOULD BE" if dry_run else "COMMITTED"), rows)


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("name", metavar="TO")
@dry_run_option("Only say where group TO would continue.")
@admin_options
def clone(source: str, name: str, dry_run: bool, as_json: bool, admin: Admin) -> None:
    """Let group TO continue where group FROM is, in every queue that FROM has committed.

    Offsets of TO move ahead, or begin; none goes back (`group reset` does that). No member of TO may read those queues.
    Retries and dead letters stay with FROM. TO is made if it does not exist.

    \b
    Example: commitmq group clone kitchen kitchen2 --dry-run
    """
    from commitmq.errors import GroupNotFoundError, ProtocolError
    from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX

    offsets = [
        (topic, queue, offset)
        for topic, queue, offset in admin.group(source)["offsets"]
        if not topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    ]
    if not offsets:
        sentence = f"group {source} has committed no offset, so there is nothing at which {name} could continue"
        raise ProtocolError("INVALID_PARAMETER", sentence)
    try:
        before = {(topic, queue): offset for topic, queue, offset in admin.group(name)["offsets"]}
        is_new = False
    except GroupNotFoundError:
        before, is_new = {}, True
    ahead = [(topic, queue, max(offset, before.get((topic, queue), 0))) for topic, queue, offset in offsets]
    if dry_run or not ahead:
        stored = ahead
    else:
        committed = admin.commit_offsets(name, ahead, copied_from=source)
        stored = [(one[0], one[1], one[2]) for one in committed]
    if as_json:
        print_json(
            {
                "from": source,
                "group": name,
                "new": is_new,
                "dry_run": dry_run,
                "offsets": [list(one) for one in stored],
            }
        )
        return
    if is_new:
        click.echo(f"group {name} did not exist; it {'would be made' if dry_run else 'is made'}")
    rows = [(topic, queue, before.get((topic, queue), "-"), offset) for topic, queue, offset in stored]
    print_table(("TOPIC", "QUEUE", "BEFORE", "WOULD BE" if dry_run else "COMMITTED"), rows)


def _chosen(
    offsets: Iterable[Sequence[Any]], topics: Collection[str], queues: Collection[int]
) -> list[tuple[str, int, int]]:
    """Those of ``offsets`` that the words of a reset name. Raises UsageError when there is none."""
    from commitmq.client.admin_results import is_of_failures

    found = [
        (topic, queue, offset)
        for topic, queue, offset in offsets
        if (topic in topics if topics else not is_of_failures(topic)) and (not queues or queue in queues)
    ]
    if not found:
        raise click.UsageError("there is no offset to begin from, in these topics and queues; --to sets one")
    return found


def _offsets_in(path: Path) -> list[tuple[str, int, int]]:
    """The committed offsets in a JSON object with ``offsets``: ``[topic, queue, offset]`` each. Raises BadParameter."""
    import orjson

    try:
        found = orjson.loads(path.read_bytes())["offsets"]
        offsets = [(topic, queue, offset) for topic, queue, offset in found]
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint="--file") from None
    except (ValueError, KeyError, TypeError):
        offsets = [("", 0, 0)]
    if not all(topic and type(topic) is str and type(queue) is type(offset) is int for topic, queue, offset in offsets):
        raise click.BadParameter(
            f'{path} must be a JSON object as `group describe --json` writes it, with "offsets": [[topic, queue, offset], …]',
            param_hint="--file",
        )
    return offsets


@click.group()
def group() -> None:
    """List consumer groups and their lag, describe one, make or delete one, reset its offsets."""


for _command in (lag, members, pop, reset, clone):
    group.add_command(_command)


@group.command(name="list")
@click.option("--all", "with_system", is_flag=True, help="Also the groups of RocketMQ's and the node's own parts.")
@click.option("--lag", "with_lag", is_flag=True, help="Also how many messages each is behind.")
@admin_options
def list_(with_system: bool, with_lag: bool, as_json: bool, admin: Admin) -> None:
    """List the groups with their members and the topics they have consumed.

    --lag asks the node for each group and for each of its topics. `group lag` shows the queues of one group.

    \b
    Example: commitmq group list --lag
    """
    from commitmq.store.metadata.topic_config import is_system_group

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
        return 0  # it was deleted in the meantime


@group.command()
@click.argument("name")
@click.option(
    "--plan", "planned", type=click.IntRange(1, 10_000), metavar="N", help="Show how N members would share the queues."
)
@admin_options
def describe(name: str, planned: int | None, as_json: bool, admin: Admin) -> None:
    """Show the members of group NAME, the queues of each, and the committed offsets.

    --plan changes nothing. Its members are those that the group has, then new ones, and they share by the group's strategy.

    \b
    Example: commitmq group describe kitchen --plan 4
    """
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
@admin_options
def create(name: str, pairs: tuple[str, ...], as_json: bool, admin: Admin) -> None:
    """Create group NAME. One that exists with the same settings is no error.

    Settings are those of `group config`. A node with groups.auto_create=false serves only groups that were made so.

    \b
    Example: commitmq group create kitchen --set retryMaxTimes=3
    """
    created = admin.group_create(name, dict(_setting(pair) for pair in pairs))
    settings = admin.group_config(name)
    print_either(
        as_json, {"created": created, "config": settings}, f"group {name} {'created' if created else 'exists already'}"
    )


@group.command()
@click.argument("name")
@click.option(
    "--offsets", is_flag=True, help="Also its committed offsets; without them it continues there if it comes again."
)
@click.option("--force", is_flag=True, help="Also while it has consumers; these make the group again.")
@yes_option
@admin_options
def delete(name: str, offsets: bool, force: bool, yes: bool, as_json: bool, admin: Admin) -> None:
    """Delete group NAME: its settings, and with --offsets its committed offsets.

    With its offsets the group stays in `group list`. Its retry and dead-letter topics stay too; `topic delete` deletes them.

    \b
    Example: commitmq group delete kitchen --offsets --yes
    """
    from commitmq.errors import GroupNotFoundError

    ask_before(f"delete group {name} with its offsets" if offsets else f"delete group {name}", yes)
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
@admin_options
def config(name: str, pairs: tuple[str, ...], as_json: bool, admin: Admin) -> None:
    """Show or change the settings of group NAME, under RocketMQ's names.

    consumeEnable=false switches a group off. --set makes a group that does not exist.
    """
    changes = dict(_setting(pair) for pair in pairs)
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
