"""``commitmq pipeline verify``: see :mod:`commitmq_plugins.spark.jobs.rebuild`."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.output import json_option, print_json
from commitmq.supervision.exit_codes import CliExit
from commitmq_plugins.spark.command_options import config_options, job_session, master_option, stores_argument


@click.command()
@stores_argument
@config_options
@master_option
@json_option
def verify(
    folders: tuple[Path, ...], config_file: Path | None, overrides: tuple[str, ...], master: str, as_json: bool
) -> None:
    """Compare log, ConsumeQueues and index of the stores in DIRS in parallel; finds the same damage as `store verify`.

    Changes nothing; exits 65 for damage. The nodes must be stopped, and executors must see the folders by the same paths.
    """
    from commitmq import config as node_config
    from commitmq_plugins.spark.jobs.rebuild import verify as work

    config = node_config.load(config_file, overrides)
    with job_session(master, "verifying", quiet=as_json, sources=folders) as spark:
        reports = work(spark, folders, config=config)
    is_sound = all(report.is_sound for report in reports.values())
    if as_json:
        stores = [{"store": str(root), **report.to_json()} for root, report in reports.items()]
        print_json({"sound": is_sound, "stores": stores})
    else:
        for root, report in reports.items():
            if len(reports) > 1:
                click.echo(f"{root}:")
            click.echo("\n".join(report.lines()))
    if not is_sound:
        raise SystemExit(int(CliExit.DAMAGE_FOUND))
