"""CommitMQ alone: single sends beside an echo, sends that meet the end of a segment, starts after ``kill -9``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import orjson

# The folder above this package, so that its modules are found as ``bench.…`` however this file was started.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.latency import measure_latency  # noqa: E402
from bench.restart import measure_restart  # noqa: E402
from bench.rolls import measure_rolls  # noqa: E402
from commitmq.bench.target import BenchTopic, machine  # noqa: E402


def main(arguments: list[str]) -> int:
    """Measure, and print the figures as JSON; returns an exit code."""
    options = _parse(arguments)
    host = machine()
    try:
        found = options.measure(options)
    except ValueError as error:
        sys.stderr.write(f"scripts/bench/node: {error}\n")
        return 1
    report = {"bench": options.bench, "machine": host, "result": found}
    print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
    return 0


def _latency(options: argparse.Namespace) -> Any:
    with BenchTopic(options.address) as topic:
        return measure_latency(topic, body_bytes=options.body, count=options.count)


def _rolls(options: argparse.Namespace) -> Any:
    return measure_rolls(
        options.folder,
        segment_bytes=options.segment_bytes,
        body_bytes=options.body,
        rolls=options.rolls,
        settings=options.set,
    )


def _restart(options: argparse.Namespace) -> Any:
    return measure_restart(
        options.folder,
        log_bytes=int(options.gib * (1 << 30)),
        topics=options.topics,
        queues=options.queues,
        tail_bytes=options.tail_mib << 20,
        body_bytes=options.body,
        cold=options.cold,
        repeat=options.repeat,
        settings=tuple(options.set),
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/node", description=(__doc__ or "").partition("\n")[0])
    benches = parser.add_subparsers(dest="bench", required=True)
    latency = benches.add_parser("latency", help="single sends to a running node beside a bare echo and fdatasync")
    latency.set_defaults(measure=_latency)
    latency.add_argument("--node", dest="address", help="admin address of the node")
    latency.add_argument("--count", type=int, default=4000, help="sends of each ack level (default 4000)")
    rolls = benches.add_parser("rolls", help="sends that meet the end of a segment, made ahead and made when needed")
    rolls.set_defaults(measure=_rolls)
    rolls.add_argument("--rolls", type=int, default=20, help="rolls of each kind (default 20)")
    rolls.add_argument("--segment-bytes", type=int, default=16 << 20, help="size of a segment (default 16777216)")
    restart = benches.add_parser("restart", help="starts after kill -9, of a large store beside a small one")
    restart.set_defaults(measure=_restart)
    restart.add_argument("--gib", type=float, default=1.0, help="GiB of the log (default 1)")
    restart.add_argument("--topics", type=int, default=100, help="default 100")
    restart.add_argument("--queues", type=int, default=10, help="queues of each topic (default 10)")
    restart.add_argument(
        "--tail-mib", type=int, default=256, help="MiB of the log that are never flushed (default 256)"
    )
    restart.add_argument("--cold", action="store_true", help="drop the store from the page cache, as a boot does")
    restart.add_argument("--repeat", type=int, default=3, help="restarts (default 3)")
    for one in (latency, rolls, restart):
        one.add_argument("--body", type=int, default=1024, help="bytes of each body (default 1024)")
    for one in (rolls, restart):
        one.add_argument("--folder", type=Path, help="where the stores are made (default: the one for temporary files)")
        one.add_argument(
            "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of the nodes"
        )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
