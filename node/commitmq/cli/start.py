"""``commitmq start``: becomes the node's keeper, or starts one in the background and waits until the node is ready."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import click
import orjson

from commitmq import config as node_config
from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.options import config_options
from commitmq.cli.output import complain, do_without, fail
from commitmq.cli.quantity import MAX_LONG
from commitmq.config import NodeConfig
from commitmq.config.fitting import fit, sizes_of
from commitmq.config.schema import DEFAULT_PROFILE, PROFILES
from commitmq.network import ports
from commitmq.store.access import private_files
from commitmq.store.layout import StoreLayout
from commitmq.supervision.console import server_lines
from commitmq.supervision.exit_codes import CliExit, StartFailed
from commitmq.supervision.exposure import Exposure
from commitmq.supervision.node_files import make_folders
from commitmq.supervision.processes import HANDLED_SIGNALS, fork, signals_held, use_as
from commitmq.supervision.roster import own_role, start_order

_LOG_TAIL_LINES = 5
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


@click.command(cls=NodeVerb)
@click.option("--store", "store", required=True, type=click.Path(path_type=Path, file_okay=False), help="Store folder.")
@config_options
@click.option(
    "--profile", type=click.Choice(list(PROFILES)), help=f"Defaults for a machine's size.  [default: {DEFAULT_PROFILE}]"
)
@click.option("--rocketmq", is_flag=True, help="Serve RocketMQ's clients too: plugins.rocketmq.enable=true.")
@click.option("--metrics", is_flag=True, help="Serve /metrics and /health too: metrics.enable=true.")
@click.option("--background", is_flag=True, help="Return when the node accepts messages.")
@click.option("--verbose", is_flag=True, help="In the foreground: log to standard error, not to commitmq/node.log.")
@click.option(
    "--allow-cut",
    type=click.IntRange(0, MAX_LONG),
    metavar="OFFSET",
    help="Let the log end at OFFSET, where a refused start says it would cut it.",
)
def start(
    store: Path,
    config_file: Path | None,
    overrides: tuple[str, ...],
    profile: str | None,
    rocketmq: bool,
    metrics: bool,
    background: bool,
    verbose: bool,
    allow_cut: int | None,
) -> None:
    """Start a node on the store folder STORE, which is created if it does not exist.

    In the foreground it runs until Ctrl-C or SIGTERM, then stops in order. It logs to commitmq/node.log in the store.

    A store knows the sizes of its files, and so does one of RocketMQ's: they need not be given. For a new store they
    come from the profile: dev and small (about 40 and 140 MB of disk with the first message), or server (3.3 GB,
    RocketMQ's own sizes).

    A start is refused if it would have to cut acknowledged messages from the log. It then changes nothing, however
    often it is repeated. The refusal names the OFFSET for --allow-cut; the cut bytes are kept in commitmq/cut.
    """
    do_without()  # the report of a start is optional: a launcher that closed its streams still wants a node
    if rocketmq:
        overrides = ("plugins.rocketmq.enable=true", *overrides)
    if metrics:
        overrides = ("metrics.enable=true", *overrides)
    if allow_cut is not None:
        overrides = (*overrides, f"commit_log.allow_cut={allow_cut}")
    config = node_config.load(config_file, overrides, profile, os.environ)
    layout = StoreLayout(store.absolute())
    # The supervisor makes the same check under the store's lock. A refusal here has touched nothing at all, not even
    # the log.
    fitted = fit(layout, config)
    if (profile or config.profile != DEFAULT_PROFILE) and sizes_of(fitted.config) != sizes_of(config):
        click.echo(f"the store has its sizes already; those of the profile {config.profile} are not used", err=True)
    try:
        Exposure.of_node(config, layout.root)
    except StartFailed as error:
        fail(str(error), error.code)
    if not layout.own.exists():
        _require_ports(config)  # a folder without an earlier start stays unchanged
    with private_files(layout.root):  # every process of the node inherits it
        make_folders(layout)
        if background:
            _start_in_background(layout, config)
        else:
            _become_the_keeper(layout, config, verbose)


def _require_ports(config: NodeConfig) -> None:
    """Exit with a sentence when a port of the node's own processes is taken or forbidden."""
    host, port = config.network.host, config.network.port
    roles = (own_role(name, module) for name, module in start_order(config).items())
    if sentence := ports.first_in_use([("admin", -1), *((one.name, one.dispatcher_slot) for one in roles)], config):
        fail(sentence, CliExit.ADDRESS_IN_USE)
    if port and (refusal := ports.why_not(host, port)):
        fail(f"cannot listen on tcp://{host}:{port}: {os.strerror(refusal)}", CliExit.START_FAILED)


def _become_the_keeper(layout: StoreLayout, config: NodeConfig, verbose: bool) -> NoReturn:
    errors_fd = os.dup(2)
    if not verbose:
        click.echo(f"starting a node on {layout.root}; its log is {layout.log} (--verbose: here)")
        use_as(layout.log, _APPEND, 2)
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    os._exit(_keep(layout, config, errors_fd, background=False))


def _keep(layout: StoreLayout, config: NodeConfig, report_fd: int, *, background: bool) -> int:
    from commitmq.supervision.keeper import Start, keep  # all that a node runs

    return keep(Start(layout.root, config, background, report_fd))


def _keep_in_background(layout: StoreLayout, config: NodeConfig, ready_fd: int) -> int:
    use_as(os.devnull, os.O_RDWR, 0)
    use_as(layout.log, _APPEND, 1, 2)
    return _keep(layout, config, ready_fd, background=True)


def _start_in_background(layout: StoreLayout, config: NodeConfig) -> None:
    log_path = layout.log
    ready_read, ready_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C: no node is left that nobody knows
    keeper = 0
    try:
        with signals_held():
            keeper = fork(partial(_keep_in_background, layout, config, ready_write), ready_write)
        os.close(ready_write)
        with open(ready_read, "rb", buffering=0) as reports:
            outcome = _wait_until_ready(reports, keeper)
    except KeyboardInterrupt:
        if keeper:
            os.kill(keeper, signal.SIGTERM)
            os.waitpid(keeper, 0)
        fail("interrupted; the node was stopped", CliExit.INTERRUPTED)
    if outcome.get("event") == "ready":
        for warning in outcome["warnings"]:
            click.secho(f"WARNING: {warning}", fg="red", bold=True, err=True)
        click.echo("\n".join([f"node is ready at {outcome['admin'][0]}", *server_lines(outcome)]))
        click.echo(f"store {layout.root}, supervisor {outcome['pid']}, log {log_path}")
        sys.stdout.flush()
        os._exit(CliExit.OK)  # tearing down the interpreter would copy what it shares with the node
    code = os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
    if "error" in outcome:
        fail(str(outcome["error"]), _known(int(outcome["code"])))
    complain(f"the node ended while it started; the end of {log_path} says why:")
    for line in log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]:
        click.echo(f"  {line}", err=True)
    raise SystemExit(int(_known(code)))


def _wait_until_ready(reports: IO[bytes], keeper: int) -> dict[str, Any]:
    """The report of how the start ended: ``ready`` or ``failed``; an empty dict when all processes died silently.

    The pipe alone is not enough: the supervisor of a start that was killed may leave workers that still hold its end.
    """
    pending = b""
    keeper_fd = os.pidfd_open(keeper)
    poller = select.poll()
    poller.register(reports, select.POLLIN)
    poller.register(keeper_fd, select.POLLIN)
    try:
        while True:
            ready = {fd for fd, _ in poller.poll()}
            chunk = reports.read(65536) if reports.fileno() in ready else b""
            pending += chunk or b""
            *lines, pending = pending.split(b"\n")
            for line in lines:
                report: dict[str, Any] = orjson.loads(line)
                # A failed start first reports that it stopped, and then why.
                if report["event"] in ("ready", "failed"):
                    return report
                if report["event"] == "info":
                    click.echo(str(report["message"]), err=True)
            if not chunk:
                return {}
    finally:
        with contextlib.suppress(OSError):
            os.close(keeper_fd)


def _known(code: int) -> CliExit:
    return CliExit(code) if code in set(CliExit) else CliExit.CRASHED
