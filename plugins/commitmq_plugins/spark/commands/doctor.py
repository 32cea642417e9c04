"""``commitmq pipeline doctor``: what Spark needs, what of it is here, and whether it works together."""

from __future__ import annotations

import click

from commitmq.cli.output import json_option, print_json
from commitmq.supervision.exit_codes import CliExit


@click.command()
@click.option("--run", is_flag=True, help="Start Spark and let it count to a thousand.")
@json_option
def doctor(run: bool, as_json: bool) -> None:
    """Say which Java, PySpark and pyarrow would be used, and what is missing."""
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
