"""``commitmq kernels``: compile the numba kernels before the first start, and show where they are kept."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.output import json_option, print_json, print_table
from commitmq.files import kernel_cache

_IN_STORE = "DIR/commitmq/kernels"
_store_option = click.option(
    "--store", type=click.Path(path_type=Path, file_okay=False), help="The store whose node will need them."
)


@click.group()
def kernels() -> None:
    """Compile the numba kernels, and show where they are kept.

    A node compiles missing kernels by itself. An installation for many accounts does it once, as the installation's
    owner.
    """


@kernels.command(cls=NodeVerb)
@_store_option
@json_option
def warm(store: Path | None, as_json: bool) -> None:
    """Compile all kernels unless that was done before; show where they are and how long it took.

    Refused when no folder can keep them: the message names the folders that were tried, and the problem of each.
    """
    if store is not None:
        kernel_cache.use_store(store.absolute())
    found = kernel_cache.choose_one_that_keeps()
    if not found.complete and not as_json:
        click.echo(f"compiling kernels into {found.folder}; this takes {kernel_cache.COMPILING_TAKES}", err=True)
    from commitmq.kernels.warm import warm as warm_all

    seconds = warm_all()
    if as_json:
        print_json({"folder": str(found.folder), "origin": found.origin, "seconds": round(seconds, 3)})
    else:
        click.echo(f"kernels are in {found.folder} ({found.origin}), loaded in {seconds:.1f} s")


@kernels.command(cls=NodeVerb)
@_store_option
@json_option
def where(store: Path | None, as_json: bool) -> None:
    """List the folders for compiled kernels in the order in which they are searched; the one in use is marked.

    The last one is in the store of a node; it is searched with --store.
    """
    if store is not None:
        kernel_cache.use_store(store.absolute())
    looked_at = kernel_cache.candidates()
    chosen = kernel_cache.choose()
    rows = [
        {
            "used": one.folder == chosen.folder,
            "origin": one.origin,
            "folder": str(one.folder),
            "state": one.problem or ("complete" if one.complete else "can be written"),
        }
        for one in looked_at
    ]
    if store is None:
        rows.append({"used": False, "origin": "store", "folder": _IN_STORE, "state": "searched with --store DIR"})
    if chosen.folder not in [one.folder for one in looked_at]:
        rows.append(
            {"used": True, "origin": chosen.origin, "folder": str(chosen.folder), "state": "for one process only"}
        )
    if as_json:
        print_json(rows)
        return
    print_table(
        ("used", "place", "state", "folder"),
        [("*" if row["used"] else "", row["origin"], row["state"], row["folder"]) for row in rows],
        left=(0, 1, 2, 3),
    )
