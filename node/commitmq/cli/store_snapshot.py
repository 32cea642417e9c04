"""``commitmq store snapshot``: see :mod:`commitmq.offline.snapshot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.node_verb import NodeVerb, address_of, request
from commitmq.cli.output import human_bytes, json_option, print_json

if TYPE_CHECKING:
    from commitmq.config import NodeConfig

_TIMEOUT_S = 10.0


@click.command(cls=NodeVerb)
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "target", metavar="NEW", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--copy", is_flag=True, help="Copy every segment, also where the file system can link them.")
@json_option
def snapshot(folder: Path, target: Path, copy: bool, as_json: bool) -> None:
    """Copy the store DIR of a running node to the new folder NEW, as a backup: `commitmq start --store NEW` restores it.

    It has every message that was acknowledged as flushed before, with the topics, groups, offsets and users. Full segments are
    links, which take no space on the same file system. ConsumeQueues and index are made from the copied log, and all
    is compared, so the whole log is read once. NEW appears when it is complete and durable; after a failure, a kill or
    a full disk there is no such folder, and the same command may be repeated.

    \b
    Example: commitmq store snapshot STORE --to /backup/monday
    """
    from commitmq import failpoints
    from commitmq.cli.output import byte_progress
    from commitmq.offline.snapshot import snapshot as work

    failpoints.play("snapshot")
    config = _settings_of(folder)
    with byte_progress("reading the copy", quiet=as_json) as progress:
        made = work(folder, target, config, link=not copy, progress=progress)
    if as_json:
        print_json(made.to_json())
        return
    click.echo(
        f"snapshot {made.folder}: the log from {made.start} to {made.end}, {made.records} records, verified;"
        f" {made.linked} segments linked, {human_bytes(made.copied_bytes)} copied, {made.seconds:.1f} s"
    )


def _settings_of(folder: Path) -> NodeConfig:
    """The settings of the node on ``folder``, which say what files are made from its log; those of plugins are left out."""
    from commitmq.config import from_mapping

    sections: dict[str, dict[str, Any]] = {}
    for row in request(address_of(folder, None), "config.show", timeout_s=_TIMEOUT_S)["settings"]:
        section, _, key = str(row["key"]).partition(".")
        if section != "plugins":
            sections.setdefault(section, {})[key] = row["value"]
    return from_mapping(sections)
