"""``commitmq store expire``: delete the oldest segments of the CommitLog by hand, of a running node or of a closed store."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.output import DEFAULT_NODE, human_bytes, json_option, print_json
from commitmq.cli.quantity import Quantity

if TYPE_CHECKING:
    from commitmq.store.layout import StoreLayout
    from commitmq.store.log.expiry import Segment


@click.command()
@click.argument(
    "folder", metavar="[DIR]", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option("--node", metavar="ADDRESS", envvar="COMMITMQ_NODE", help=f"Admin address.  [default: {DEFAULT_NODE}]")
@click.option("--before", metavar="TIME", help="Delete messages stored before TIME (ISO 8601, UTC without an offset).")
@click.option("--keep-bytes", type=Quantity("bytes"), metavar="SIZE", help="Delete all but the newest SIZE of log.")
@click.option("--dry-run", is_flag=True, help="Print the deletions and delete nothing.")
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
