"""``commitmq store``: read a store folder without a node, repair the files derived from its log, delete old segments."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.node_verb import NodeVerb, address_of, request
from commitmq.cli.options import (
    DEFAULT_NODE,
    config_options,
    dry_run_option,
    folder_argument,
    json_option,
    node_or_none_option,
    yes_option,
)
from commitmq.cli.output import ask_before, complain, fail, human_bytes, print_either, print_json
from commitmq.cli.quantity import Quantity
from commitmq.errors import CommitMQError, CorruptRecordError
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.config import NodeConfig
    from commitmq.format.record import Record
    from commitmq.offline.extents import Extent
    from commitmq.offline.held_store import HeldStore
    from commitmq.store.layout import StoreLayout
    from commitmq.store.log.expiry import Segment


@click.group()
def store() -> None:
    """Inspect a store folder, repair it, and delete old messages."""


@store.command()
@click.argument(
    "folder", metavar="[DIR]", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@node_or_none_option
@click.option("--before", metavar="TIME", help="Delete messages stored before TIME (ISO 8601, UTC without an offset).")
@click.option("--keep-bytes", type=Quantity("bytes"), metavar="SIZE", help="Delete all but the newest SIZE of log.")
@dry_run_option("Print the deletions and delete nothing.")
@json_option
def expire(
    folder: Path | None, node: str | None, before: str | None, keep_bytes: int | None, dry_run: bool, as_json: bool
) -> None:
    """Delete the oldest segments of the CommitLog: of the running node, or of the closed store in DIR.

    Whole segments are deleted, oldest first; the segment that is written to stays. With both --before and --keep-bytes
    only segments that both allow are deleted. A node without either deletes the segments that its configuration lets
    expire, at any hour. It keeps the segments that its configuration protects (keep_unconsumed). A store that a node
    holds is refused: ask the node.

    A store that was not closed in order can be expired as far as the next start has nothing to recover there. That
    needs no space: it is the way out when a disk is so full that no node can start on it.
    """
    when = None if before is None else _time(before)
    source = click.get_current_context().get_parameter_source("node")
    if folder is not None and source is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("give either DIR, a closed store, or --node ADDRESS")
    if folder is None:
        from commitmq.client.admin import Admin

        with Admin(node or DEFAULT_NODE) as admin:
            done = admin.expire(before=when, keep_bytes=keep_bytes, dry_run=dry_run)
    elif when is None and keep_bytes is None:
        raise click.UsageError("for a store folder give --before or --keep-bytes")
    else:
        done = _expire_folder(folder, when, keep_bytes, dry_run)
    if as_json:
        print_json(done)
        return
    verb = "would be deleted" if dry_run else "deleted"
    click.echo(f"{len(done['segments'])} segments {verb}, {human_bytes(done['disk_bytes'])}")
    click.echo(
        f"the log {'would begin' if dry_run else 'begins'} at {done['min_offset']}; the next segment: {done['kept']}"
    )


def _time(text: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no ISO 8601 time", param_hint="--before") from None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def _expire_folder(folder: Path, before: datetime | None, keep_bytes: int | None, dry_run: bool) -> dict[str, Any]:
    from commitmq.config import NodeConfig
    from commitmq.extras import need_node

    need_node("`commitmq store expire` of a closed store")
    from commitmq.offline.expire import safe_end
    from commitmq.offline.held_store import HeldStore

    with HeldStore(folder, NodeConfig()) as held:
        segment_bytes = held.config.commit_log.segment_bytes
        return _expire_locked(held.layout, segment_bytes, before, keep_bytes, dry_run, safe_end(held))


def _expire_locked(
    layout: StoreLayout, segment_bytes: int, before: datetime | None, keep_bytes: int | None, dry_run: bool, safe: int
) -> dict[str, Any]:
    from commitmq.offline.expire import expire as expire_closed
    from commitmq.store.log import expiry
    from commitmq.store.log.commit_log import CommitLog

    expiry.finish_expiry(layout, segment_bytes)
    log = CommitLog(layout.commit_log, segment_bytes, max_mapped=2)
    try:
        segments = expiry.look_at_segments(layout.commit_log, segment_bytes)
        end = _log_end(log, segments)
        ends = [] if keep_bytes is None else [end - keep_bytes]
        if before is not None:
            ends.append(expiry.offset_before(log, segments, int(before.timestamp() * 1000)))
    finally:
        log.close()
    done = expire_closed(layout, segments, min(*ends, safe), end, dry_run=dry_run)
    kept = "it is the last segment" if len(done.segments) >= len(segments) - 1 else "newer than was asked for"
    if safe < min(ends):
        kept = f"from {safe} on the next start recovers it"
    return {
        "segments": list(done.segments),
        "disk_bytes": done.disk_bytes,
        "min_offset": done.min_offset,
        "followers": done.followers,
        "kept": kept,
        "dry_run": dry_run,
    }


def _log_end(log: Any, segments: tuple[Segment, ...]) -> int:
    """The offset behind the last record; the newest segment may hold none."""
    from commitmq.store.log.commit_log import TornTailError
    from commitmq.store.log.expiry import first_timestamp

    for segment in reversed(segments):
        if first_timestamp(log, segment.base) >= 0:
            end = segment.base
            with contextlib.suppress(TornTailError):  # a crash left it: the next start ends the log there
                for offset, size in log.iter_spans(segment.base):
                    end = offset + size
            return int(end)
    return segments[0].base if segments else 0


@store.command(cls=NodeVerb)
@folder_argument
@click.option("--only", type=click.Choice(["queues", "index"]), help="One kind of files.  [default: both]")
@config_options
@json_option
def rebuild(
    folder: Path, only: str | None, config_file: Path | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Rebuild the ConsumeQueues and the index of the store in DIR from its CommitLog alone.

    The node must be stopped. The old files are kept too. File sizes are the store's own; for the index
    others can be given with --set. Afterwards the store is compared as `store verify` does it, and the exit code is 65
    when something is not right: a log may hold records that no queue can show.
    """
    from commitmq import config as node_config
    from commitmq.cli.output import byte_progress
    from commitmq.offline.held_store import HeldStore
    from commitmq.offline.rebuild import KINDS
    from commitmq.offline.rebuild import rebuild as work
    from commitmq.offline.rebuild_parallel import checked

    config = node_config.load(config_file, overrides, environment=os.environ)
    kinds = KINDS if only is None else (only,)
    with (
        HeldStore(folder, config, new_index="index" in kinds) as store,
        byte_progress("rebuilding", quiet=as_json) as progress,
    ):
        done = checked(store, work(store, kinds, progress), kinds, progress)
    if as_json:
        print_json(done.to_json())
    else:
        click.echo(done.line(only))
        click.echo(f"the old files are in {done.kept}")
        for line in done.left_lines():
            click.echo(line)
    if done.left:
        raise SystemExit(int(CliExit.DAMAGE_FOUND))


@store.command(cls=NodeVerb)
@folder_argument
@click.option("--cut", "how", flag_value="cut", help="End the log where the damage begins.")
@click.option(
    "--skip", "how", flag_value="skip", help="Take out the damaged records only, and keep the records behind them."
)
@click.option(
    "--restore-cut", "how", flag_value="restore-cut", help="Put back the bytes of the last cut, from commitmq/cut."
)
@config_options
@yes_option
@json_option
def repair(
    folder: Path, how: str | None, config_file: Path | None, overrides: tuple[str, ...], yes: bool, as_json: bool
) -> None:
    """Show the damage in the log of the store in DIR; with --cut or --skip, repair it.

    The node must be stopped. The removed bytes are copied to commitmq/cut first, and --restore-cut puts back the last
    cut of a repair or a start, unless messages were stored in its place since. Exits 65 while there is damage.
    """
    from commitmq import config as node_config
    from commitmq.cli.output import byte_progress
    from commitmq.offline.held_store import HeldStore
    from commitmq.offline.log_damage import find_damage
    from commitmq.offline.repair import repair as work

    with HeldStore(folder, node_config.load(config_file, overrides, environment=os.environ)) as store:
        if how == "restore-cut":
            _restore(store, yes, as_json)
            return
        if how is None:
            _show(find_damage(store), store.config.commit_log.segment_bytes, as_json)
            return
        if how == "cut":
            ask_before(f"end the log in {folder} where its damage begins, without the messages after it", yes)
        else:
            ask_before(f"take the damaged records out of the log in {folder}", yes)
        with byte_progress("repairing", quiet=as_json) as progress:
            done = work(store, "cut" if how == "cut" else "skip", progress)
    if as_json:
        print_json(
            {
                "damage": [[one.start, one.end, one.damage] for one in done.damage],
                "lost_bytes": done.lost_bytes,
                "blanked_units": done.blanked_units,
                "evidence": [str(path) for path in done.evidence],
            }
        )
    elif not done.damage:
        click.echo("the log is whole, nothing was changed")
    else:
        ended = f"the log ends at {done.damage[0].start} now, " if how == "cut" else ""
        click.echo(f"{ended}{done.lost_bytes} bytes were taken out of it ({len(done.damage)} damaged place(s))")
        if done.blanked_units:
            click.echo(f"{done.blanked_units} message(s) cannot be read any more; the others kept their offsets")
        for path in done.evidence:
            click.echo(f"the removed bytes are copied to {path}")


def _restore(store: HeldStore, yes: bool, as_json: bool) -> None:
    from commitmq.cli.output import byte_progress
    from commitmq.offline.repair import restorable, restore
    from commitmq.store.recovery import cut_record

    cuts = restorable(store)
    if cuts and not yes:
        click.echo(cut_record.sentence(store.layout, cuts[0]))
    if cuts:
        ask_before("put this back", yes)
    with byte_progress("restoring", quiet=as_json) as progress:
        done = restore(store, progress)
    if as_json:
        cut = None if done.cut is None else done.cut.to_json(store.layout)
        print_json({"restored": cut, "bytes": done.restored_bytes, "damage": list(done.damage), "left": len(cuts[1:])})
    elif done.cut is None:
        click.echo("nothing was cut from this log, or everything is back")
    else:
        click.echo(
            f"put back {done.restored_bytes} bytes at physical offset {done.cut.parts[0].begin if done.cut.parts else 0}"
        )
        for line in done.damage:
            click.echo(line)
        if cuts[1:]:
            click.echo(f"{len(cuts) - 1} older cut(s) are kept too")
    if done.damage:
        raise SystemExit(int(CliExit.DAMAGE_FOUND))


def _show(damage: list[Extent], segment_bytes: int, as_json: bool) -> None:
    if as_json:
        print_json({"damage": [[one.start, one.end, one.damage] for one in damage]})
    elif not damage:
        click.echo("the log is whole")
    for one in damage if not as_json else []:
        base = one.start - one.start % segment_bytes
        click.echo(f"segment {base:020d} at {one.start - base}, {one.end - one.start} bytes: {one.damage}")
    if damage:
        if not as_json:
            click.echo("--cut ends the log there; --skip takes out these bytes only")
        raise SystemExit(int(CliExit.DAMAGE_FOUND))


_TIMEOUT_S = 10.0


@store.command(cls=NodeVerb)
@folder_argument
@click.option("--to", "target", metavar="NEW", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--copy", is_flag=True, help="Copy every segment, also where the file system can link them.")
@json_option
def snapshot(folder: Path, target: Path, copy: bool, as_json: bool) -> None:
    """Copy the store DIR of a running node to the new folder NEW, as a backup: `commitmq start --store NEW` restores it.

    It has every message that was acknowledged as flushed before, with the topics, groups, offsets and users. Full segments are
    links, which take no space on the same file system. ConsumeQueues and index are made from the copied log, and all
    is compared, so the whole log is read once. NEW appears when it is complete and durable; after a failure, a kill or
    a full disk there is no such folder, and the same command may be repeated.

    \b
    Example: commitmq store snapshot STORE --to /backup/monday
    """
    from commitmq import failpoints
    from commitmq.cli.output import byte_progress
    from commitmq.offline.snapshot import snapshot as work

    failpoints.play("snapshot")
    config = _settings_of(folder)
    with byte_progress("reading the copy", quiet=as_json) as progress:
        made = work(folder, target, config, link=not copy, progress=progress)
    print_either(
        as_json,
        made.to_json(),
        f"snapshot {made.folder}: the log from {made.start} to {made.end}, {made.records} records, verified;"
        f" {made.linked} segments linked, {human_bytes(made.copied_bytes)} copied, {made.seconds:.1f} s",
    )


def _settings_of(folder: Path) -> NodeConfig:
    """The settings of the node on ``folder``, which say what files are made from its log; those of plugins are omitted."""
    from commitmq.config import from_mapping

    sections: dict[str, dict[str, Any]] = {}
    for row in request(address_of(folder, None), "config.show", timeout_s=_TIMEOUT_S)["settings"]:
        section, _, key = str(row["key"]).partition(".")
        if section != "plugins":
            sections.setdefault(section, {})[key] = row["value"]
    return from_mapping(sections)


@store.command(cls=NodeVerb)
@folder_argument
@config_options
@json_option
def verify(folder: Path, config_file: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Read the whole store in DIR and compare log, ConsumeQueues, index and timer wheel. Changes nothing; exits 65 for damage.

    The node must be stopped; `commitmq store snapshot` copies the store of a running one, and verifies the copy.
    File sizes are the store's own. Cuts of the log that are kept in commitmq/cut are reported too; they are no damage of the
    rest.
    """
    from commitmq import config as node_config
    from commitmq.cli.output import byte_progress
    from commitmq.errors import StoreLockedError
    from commitmq.offline.held_store import HeldStore
    from commitmq.offline.verify import verify as work
    from commitmq.store.recovery import cut_record

    config = node_config.load(config_file, overrides, environment=os.environ)
    try:
        with HeldStore(folder, config) as store, byte_progress("verifying", quiet=as_json) as progress:
            report = work(store, progress)
            cuts = [cut for cut in cut_record.load(store.layout) if not cut.restored]
    except StoreLockedError as error:
        way = "stop the node; or `commitmq store snapshot` makes a copy of a running node's store, and verifies it"
        fail(f"{error}; {way}", CliExit.STORE_LOCKED)
    if as_json:
        print_json({**report.to_json(), "cuts": [cut.to_json(store.layout) for cut in cuts]})
    else:
        click.echo("\n".join(report.lines()))
        for cut in cuts:
            click.echo(f"was cut from the log, {cut_record.sentence(store.layout, cut)}")
    if not report.is_sound:
        raise SystemExit(int(CliExit.DAMAGE_FOUND))


@store.command()
@folder_argument
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
