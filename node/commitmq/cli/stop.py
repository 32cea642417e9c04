"""``commitmq stop``: ask a node to drain; return when it has drained and all its processes have ended."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import click

from commitmq.cli.options import running_store_option
from commitmq.cli.output import do_without, fail, node_unless
from commitmq.store.access import lock_holder
from commitmq.store.layout import StoreLayout
from commitmq.store.recovery import abort_file
from commitmq.supervision.exit_codes import CliExit
from commitmq.supervision.node_files import read_node_file
from commitmq.supervision.processes import free_locks, open_process, wait_for_exit

_ORPHAN_PATIENCE_S = 5.0


@click.command()
@running_store_option
@click.option(
    "--node",
    metavar="ADDRESS",
    envvar="COMMITMQ_NODE",
    show_envvar=True,
    help="Admin address of a node, for example tcp://127.0.0.1:7310.",
)
def stop(store: Path | None, node: str | None) -> None:
    """Stop a node in order: accepted messages are flushed and dispatched, then every process ends.

    Exit code 75 means that the node is gone but did not end in order; its next start recovers the store.
    """
    do_without()  # as in a start: the report is optional
    node = node_unless(store, node)
    if store is None and node is None:
        raise click.UsageError("give --store DIR or --node ADDRESS, or set COMMITMQ_NODE")
    clean = stop_store(store) if store is not None else _stop_address(str(node))
    if not clean:
        fail("the node is gone but did not stop in order; its next start recovers the store", CliExit.UNCLEAN_STOP)
    click.echo("node stopped")


def stop_store(store: Path) -> bool:
    """Stop the node on the folder ``store``; True when it left the store closed in order."""
    layout = StoreLayout(store.absolute())
    known = read_node_file(layout)
    pids = _open_processes(known)
    holder = lock_holder(layout.lock)
    if not pids:
        if holder:
            fail(f"process {holder} holds the store {layout.root}, and it is no node that this command can stop")
        fail(f"no node runs on the store {layout.root}", CliExit.NODE_UNAVAILABLE)
    # Signal the keeper first: it passes the signal on, and it would restart a supervisor that dies in the meantime.
    for pidfd in pids:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    _wait_for_all(pids)
    _end_orphans(layout)
    return not abort_file.exists(layout.abort)


def _open_processes(known: dict[str, Any]) -> list[int]:
    """pidfds of the keeper and the supervisor named in ``run/node.json``, if they live."""
    found = [
        open_process(int(known.get(f"{name}pid") or 0), known.get(f"{name}started_ticks")) for name in ("keeper_", "")
    ]
    return [pidfd for pidfd in found if pidfd is not None]


def _wait_for_all(pids: list[int]) -> None:
    for pidfd in pids:
        wait_for_exit(pidfd, None)
        os.close(pidfd)


def _end_orphans(layout: StoreLayout) -> None:
    """Workers exit when their supervisor does; a worker that hangs must not survive a stop."""
    try:
        free_locks(layout.run.glob("*.lock"), _ORPHAN_PATIENCE_S)
    except BlockingIOError as error:
        fail(f"a process of the node is still there: {error}", CliExit.UNCLEAN_STOP)


def _stop_address(address: str) -> bool:
    """Stop the node at ``address``. For a node on this machine also wait for its processes."""
    from commitmq.cli.node_verb import request  # zmq is not needed to stop by store

    node = request(address, "status", timeout_s=5)["node"]
    layout = StoreLayout(Path(node["store"]))
    known = read_node_file(layout)
    pids = _open_processes(known) if known.get("token") == node["token"] else []
    clean = bool(request(address, "stop", timeout_s=None)["clean"])
    _wait_for_all(pids)
    if pids:
        _end_orphans(layout)
    return clean
