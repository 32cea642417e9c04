"""``commitmq rocketmq``: verbs about clusters of RocketMQ's protocol."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import click

from commitmq.cli.output import fail, json_option, print_json
from commitmq.cli.quantity import seconds
from commitmq.cli.secret_input import read_secret
from commitmq.supervision.exit_codes import CliExit


@click.group()
def rocketmq() -> None:
    """Examine a cluster of RocketMQ's protocol."""


@rocketmq.command()
@click.argument("namesrv")
@click.option("--topic", "topics", metavar="TOPIC", multiple=True, help="Also look at this topic's route; repeatable.")
@click.option(
    "--write", is_flag=True, help="Also send, receive and commit on a topic of the doctor's own; it is deleted."
)
@click.option(
    "--timeout", "timeout_s", type=seconds(0.05), default=3.0, show_default=True, help="Seconds of each wait."
)
@click.option("--tls", is_flag=True, help="Connect with TLS. Certificates are not checked.")
@click.option("--access-key", metavar="USER", help="Sign each request as this user; standard input has the secret.")
@click.option("--most", type=click.IntRange(1, 10_000), default=64, show_default=True, help="Most brokers to look at.")
@json_option
def doctor(
    namesrv: str,
    topics: tuple[str, ...],
    write: bool,
    timeout_s: float,
    tls: bool,
    access_key: str | None,
    most: int,
    as_json: bool,
) -> None:
    """Connect as a client does, and say what works.

    NAMESRV is one name server or several, as HOST:PORT;HOST:PORT, of CommitMQ or of RocketMQ. Without --write nothing is
    changed. Exit code 0: everything works, perhaps with warnings; 1: something does not; 69: no name server answers.
    """
    from commitmq_plugins.rocketmq.doctor.addresses import AddressError, parse_all
    from commitmq_plugins.rocketmq.doctor.examination import Examination, Wanted
    from commitmq_plugins.rocketmq.doctor.finding import Finding, State
    from commitmq_plugins.rocketmq.doctor.peer import Keys, Terms

    try:
        places = parse_all(namesrv)
    except AddressError as error:
        raise click.BadParameter(str(error), param_hint="NAMESRV") from error
    if not places:
        raise click.BadParameter("it names no server", param_hint="NAMESRV")
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            click.echo(finding.line())

    wanted = Wanted(
        places, topics, write, most, Terms(timeout_s, tls, Keys(access_key, read_secret()) if access_key else None)
    )
    examination = Examination(wanted, report)
    interrupted = not _ran(examination.run())
    works = not interrupted and examination.reached and all(one.state != State.FAILED for one in findings)
    if as_json:
        print_json({"works": works, "findings": [one.to_json() for one in findings]})
    if interrupted:
        raise SystemExit(int(CliExit.INTERRUPTED))
    if not examination.reached:
        fail(f"no name server answers at {namesrv}", CliExit.NODE_UNAVAILABLE)
    if not works:
        raise SystemExit(int(CliExit.FAILURE))


def _ran(work: Any) -> bool:
    """False when Ctrl-C or SIGTERM ended ``work``, which has cleaned up by then."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return False
    return True
