"""``commitmq pipeline doctor``: reports which prerequisites of Spark are installed, and whether they work together."""

from __future__ import annotations

import click

from commitmq.cli.output import json_option, print_json
from commitmq.supervision.exit_codes import CliExit


@click.command()
@click.option("--run", is_flag=True, help="Start Spark and let it count to a thousand.")
@json_option
def doctor(run: bool, as_json: bool) -> None:
    """Show which Java, PySpark and pyarrow would be used, and which are missing."""
    from commitmq_plugins.spark.diagnosis import diagnose

    findings = diagnose(run=run)
    if as_json:
        print_json({"ready": all(one.good for one in findings), "findings": [one.to_json() for one in findings]})
    else:
        for one in findings:
            mark = "ok  " if one.good else "??  " if one.optional else "MISSING"
            click.echo(f"{mark:8}{one.what}: {one.detail}")
    if not all(one.good or one.optional for one in findings):
        raise SystemExit(int(CliExit.FAILURE))
