"""``commitmq start``: becomes the node's keeper, or starts one in the background and waits until the node is ready."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, NoReturn

import click
import orjson

from commitmq import config as node_config
from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.output import complain, do_without, fail
from commitmq.cli.quantity import MAX_LONG
from commitmq.config import NodeConfig
from commitmq.config.fitting import fit, sizes_of
from commitmq.config.schema import DEFAULT_PROFILE, PROFILES
from commitmq.network import ports
from commitmq.store.access import keep_private
from commitmq.store.layout import StoreLayout
from commitmq.supervision.console import server_lines
from commitmq.supervision.exit_codes import CliExit, StartFailed
from commitmq.supervision.exposure import Exposure
from commitmq.supervision.node_files import make_folders
from commitmq.supervision.roster import own_role, start_order

_LOG_TAIL_LINES = 5


@click.command(cls=NodeVerb)
@click.option("--store", "store", required=True, type=click.Path(path_type=Path, file_okay=False), help="Store folder.")
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of keys.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable.")
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
        _require_ports(config)  # a folder without a former start stays unchanged
    keep_private(layout.root)  # inherited by every process of the node
    make_folders(layout)
    # A memory file instead of arguments: every supervisor that the keeper starts reads exactly these values.
    config_fd = os.memfd_create("commitmq-config", 0)
    os.write(config_fd, node_config.dumps(config))
    if background:
        _start_in_background(layout, config, config_fd)
    else:
        _become_the_keeper(layout, config_fd, verbose)


def _require_ports(config: NodeConfig) -> None:
    """Exit with a sentence when a port of the node's own processes is taken or forbidden."""
    host, port = config.network.host, config.network.port
    roles = (own_role(name, module) for name, module in start_order(config).items())
    if sentence := ports.first_in_use([("admin", -1), *((one.name, one.dispatcher_slot) for one in roles)], config):
        fail(sentence, CliExit.ADDRESS_IN_USE)
    if port and (refusal := ports.why_not(host, port)):
        fail(f"cannot listen on tcp://{host}:{port}: {os.strerror(refusal)}", CliExit.START_FAILED)


def _become_the_keeper(layout: StoreLayout, config_fd: int, verbose: bool) -> NoReturn:
    errors_fd = os.dup(2)
    for fd in (config_fd, errors_fd):
        os.set_inheritable(fd, True)
    if not verbose:
        click.echo(f"starting a node on {layout.root}; its log is {layout.log} (--verbose: here)")
        with open(layout.log, "ab") as log:
            os.dup2(log.fileno(), 2)
    sys.stdout.flush()
    os.execv(sys.executable, _keeper_command(layout, config_fd, errors_fd, "foreground"))


def _keeper_command(layout: StoreLayout, config_fd: int, ready_fd: int, mode: str) -> list[str]:
    return [sys.executable, "-m", "commitmq.supervision.keeper", str(layout.root), str(config_fd), str(ready_fd), mode]


def _start_in_background(layout: StoreLayout, config: NodeConfig, config_fd: int) -> None:
    log_path = layout.log
    ready_read, ready_write = os.pipe()
    with open(log_path, "ab") as log:
        keeper = subprocess.Popen(
            _keeper_command(layout, config_fd, ready_write, "background"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[config_fd, ready_write],
            start_new_session=True,
        )
    os.close(ready_write)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C: no node is left that nobody knows
    try:
        with open(ready_read, "rb", buffering=0) as reports:
            outcome = _wait_until_ready(reports, keeper)
    except KeyboardInterrupt:
        keeper.send_signal(signal.SIGTERM)
        keeper.wait()
        fail("interrupted; the node was stopped", CliExit.INTERRUPTED)
    if outcome.get("event") == "ready":
        for warning in outcome["warnings"]:
            click.secho(f"WARNING: {warning}", fg="red", bold=True, err=True)
        click.echo("\n".join([f"node is ready at {outcome['admin'][0]}", *server_lines(outcome)]))
        click.echo(f"store {layout.root}, supervisor {outcome['pid']}, log {log_path}")
        keeper.returncode = 0  # the keeper lives on; this process does not wait for it
        return
    code = keeper.wait()
    if "error" in outcome:
        fail(str(outcome["error"]), _known(int(outcome["code"])))
    complain(f"the node ended while it started; the end of {log_path} says why:")
    for line in log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]:
        click.echo(f"  {line}", err=True)
    raise SystemExit(int(_known(code)))


def _wait_until_ready(reports: IO[bytes], keeper: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The report of how the start ended: ``ready`` or ``failed``; an empty dict when all processes died silently.

    The pipe alone is not enough: the supervisor of a start that was killed may leave workers that still hold its end.
    """
    pending = b""
    keeper_fd = os.pidfd_open(keeper.pid)
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
