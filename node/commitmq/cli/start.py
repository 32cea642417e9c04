"""``commitmq start``: becomes the node's keeper, or leaves one behind and waits until the node accepts messages."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import click
import orjson

from commitmq import config as node_config
from commitmq.admin_socket import exposure_warning, is_loopback
from commitmq.cli.exit_codes import CliExit
from commitmq.cli.output import complain, fail
from commitmq.config import NodeConfig
from commitmq.node_files import make_folders
from commitmq.store.layout import StoreLayout

_LOG_TAIL_LINES = 5


@click.command()
@click.option("--store", "store", required=True, type=click.Path(path_type=Path, file_okay=False), help="Store folder.")
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of keys.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable.")
@click.option("--background", is_flag=True, help="Return when the node accepts messages; log to commitmq/node.log.")
def start(store: Path, config_file: Path | None, overrides: tuple[str, ...], background: bool) -> None:
    """Start a node on the store folder STORE, which is created if it does not exist.

    In the foreground it logs to standard error until Ctrl-C or SIGTERM, then stops in order.
    """
    config = node_config.load(config_file, overrides)
    layout = StoreLayout(store.absolute())
    make_folders(layout)
    if not is_loopback(config.network.host):
        warning = exposure_warning(config.network.host, config.network.port)
        click.secho(f"WARNING: {warning}", fg="red", bold=True, err=True)
    # A memory file instead of arguments: every supervisor that the keeper starts reads these very values.
    config_fd = os.memfd_create("commitmq-config", 0)
    os.write(config_fd, orjson.dumps(config.to_dict()))
    if background:
        _start_in_background(layout, config, config_fd)
    else:
        os.set_inheritable(config_fd, True)
        os.execv(sys.executable, _keeper_command(layout, config_fd, -1, "foreground"))


def _keeper_command(layout: StoreLayout, config_fd: int, ready_fd: int, mode: str) -> list[str]:
    return [sys.executable, "-m", "commitmq.keeper", str(layout.root), str(config_fd), str(ready_fd), mode]


def _start_in_background(layout: StoreLayout, config: NodeConfig, config_fd: int) -> None:
    log_path = layout.own / "node.log"
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
    try:
        with open(ready_read, "rb", buffering=0) as reports:
            outcome = _wait_until_ready(reports, keeper)
    except KeyboardInterrupt:
        keeper.send_signal(signal.SIGTERM)
        keeper.wait()
        fail("interrupted; the node was stopped", CliExit.INTERRUPTED)
    if outcome.get("event") == "ready":
        click.echo(f"node is ready at {outcome['admin'][0]}")
        click.echo(f"store {layout.root}, supervisor {outcome['pid']}, log {log_path}")
        keeper.returncode = 0  # it lives on; nobody here waits for it
        return
    code = keeper.wait()
    if "error" in outcome:
        fail(str(outcome["error"]), _known(int(outcome["code"])))
    complain(f"the node ended while it started; the end of {log_path} says why:")
    for line in log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]:
        click.echo(f"  {line}", err=True)
    raise SystemExit(int(_known(code)))


def _wait_until_ready(reports: IO[bytes], keeper: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The report that says how the start ended: ``ready`` or ``failed``; an empty dict when everybody died silently.

    The pipe alone is not enough: a supervisor of a start that was killed may leave workers that still hold its end.
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
                if report["event"] != "info":
                    return report
                click.echo(str(report["message"]), err=True)
            if not chunk:
                return {}
    finally:
        with contextlib.suppress(OSError):
            os.close(keeper_fd)


def _known(code: int) -> CliExit:
    return CliExit(code) if code in set(CliExit) else CliExit.CRASHED
