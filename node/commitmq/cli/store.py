"""``commitmq store``: read a store folder without a node, repair the files derived from its log, delete old segments."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.output import complain
from commitmq.cli.store_expire import expire
from commitmq.cli.store_rebuild import rebuild
from commitmq.cli.store_repair import repair
from commitmq.cli.store_snapshot import snapshot
from commitmq.cli.store_verify import verify
from commitmq.errors import CommitMQError, CorruptRecordError
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.format.record import Record


@click.group()
def store() -> None:
    """Inspect a store folder, repair it, and delete old messages."""


store.add_command(expire)
store.add_command(rebuild)
store.add_command(snapshot)
store.add_command(verify)
store.add_command(repair)


@store.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write JSON lines, which dump does anyway.")
def dump(folder: Path, as_json: bool) -> None:
    """Write every message of the store in DIR, one JSON line each, in the order of the CommitLog.

    A record that is an inner batch is one line, with its messages as inner_messages; with damage instead, when its body
    cannot be decompressed.

    DIR is opened read-only; the node may run or not. The size of a segment is the store's own. At a torn tail (a crash
    cut a record short) the dump ends with a note on standard error; at damage before the end it exits 74.
    """
    from commitmq.store.log.commit_log import TornTailError

    del as_json
    out = sys.stdout
    try:
        for record in _records(folder):
            out.write(json.dumps(_line(record), separators=(",", ":")))
            out.write("\n")
    except TornTailError as error:
        out.flush()
        complain(f"stopped at the end of the undamaged log: {error}")
    except CorruptRecordError as error:
        out.flush()
        complain(f"stopped at damage: {error}")
        raise SystemExit(int(CliExit.STORE_UNUSABLE)) from None
    out.flush()


def _line(record: Record) -> dict[str, Any]:
    from commitmq.format.client_batch import decode_client_batch
    from commitmq.format.compression import decompress
    from commitmq.format.constants import SysFlag

    line = record.to_json()
    if record.sys_flag & SysFlag.INNER_BATCH:
        body = record.body
        if record.sys_flag & SysFlag.COMPRESSED:
            try:
                body = decompress(body, record.sys_flag)
            except CommitMQError as error:
                line["damage"] = str(error)
                return line
        line["inner_messages"] = [
            {
                "queue_offset": record.queue_offset + number,
                "flag": one.flag,
                "properties": dict(sorted(one.decoded_properties().items())),
                "body_hex": one.body.hex(),
            }
            for number, one in enumerate(decode_client_batch(body))
        ]
    return line


def _records(folder: Path) -> Iterator[Record]:
    from commitmq.store.access import require_store
    from commitmq.store.geometry import SEGMENT, look
    from commitmq.store.layout import StoreLayout
    from commitmq.store.log.commit_log import CommitLog

    layout = StoreLayout(folder)
    require_store(layout)
    size = look(layout, index=False).sizes.get(SEGMENT)
    if size is None:
        return
    # Two mappings are enough for a walk from front to back, so the dump of a large store uses little memory.
    log = CommitLog(layout.commit_log, size, max_mapped=2)
    try:
        yield from log.iter_records()
    finally:
        log.close()
