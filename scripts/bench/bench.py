"""The command: options, the order of rounds, and the written files."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, get_args

from bench import machine, report
from bench.results import Results
from bench.session import Session
from bench.system import BenchError, Durability, System
from bench.systems import SYSTEMS, before, load
from bench.workloads import BOTH, RESTART, Part, Size, Workload, workloads

_RESULTS = Path(__file__).resolve().parent / "results"
_ROUNDS = 3
_NOT_QUICK = ("confluent", "commitmq-rocketmq")  # other clients of brokers that are measured already
_BY_OPTION = "before"  # a system that another option calls for
_started = time.monotonic()


def main(arguments: list[str]) -> int:
    """Run the comparison; returns an exit code."""
    signal.signal(signal.SIGTERM, _interrupted)
    signal.signal(signal.SIGHUP, _interrupted)
    options = _parse(arguments)
    try:
        if options.report:
            results = Results.load(options.report)
        else:
            results = _run(options, arguments)
        for path in report.write(results, plots=not options.no_plots):
            print(path)
    except BenchError as error:
        _tell(str(error))
        return 1
    except KeyboardInterrupt:
        _tell("interrupted; --resume FOLDER continues behind the last complete session")
        return 130
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench/run",
        description="CommitMQ beside RocketMQ, Kafka, Redis and NATS on this machine, in one run. Progress goes to standard"
        " error, the names of the written files to standard output.",
    )
    parser.add_argument(
        "--quick", dest="size", action="store_const", const="quick", default="full", help="less than ten minutes"
    )
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="to try the command itself")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N", help="repeats of everything (default: 3)")
    parser.add_argument(
        "--systems",
        type=_names(list(SYSTEMS)),
        metavar="A,B",
        help=f"of {', '.join(SYSTEMS)} (default: all but {_BY_OPTION}, with --quick all but {', '.join(_NOT_QUICK)} too)",
    )
    known = [one.name for one in (*workloads("full"), RESTART)]
    parser.add_argument(
        "--before",
        type=Path,
        metavar="FOLDER",
        help="another checkout of the project with its .venv: its node and its client are one more system",
    )
    parser.add_argument("--only", type=_names(known), metavar="A,B", help="these workloads: " + ", ".join(known))
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="new folder for results (default: below results/)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="continue an interrupted run")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="measure nothing, write tables and plots again")
    parser.add_argument(
        "--dir", type=Path, metavar="FOLDER", help="where stores are made (default: for temporary files)"
    )
    parser.add_argument("--no-plots", action="store_true", help="needs no matplotlib")
    options = parser.parse_args(arguments)
    if options.systems is None:
        left_out = {_BY_OPTION} if options.size == "full" else {_BY_OPTION, *_NOT_QUICK}
        options.systems = [name for name in SYSTEMS if name not in left_out]
    if options.before:
        os.environ[before.VARIABLE] = str(options.before.resolve())
        options.systems = list(dict.fromkeys([*options.systems, _BY_OPTION]))
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> Results:
    """Measure the sessions that are asked for and not yet done. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="commitmq-compare-", dir=options.dir) as folder:
        results = _results(options, arguments, Path(folder))
        about = results.document["options"]
        systems = _present(results, about["systems"])
        chosen = _chosen(about["size"], about["only"])
        for number in range(1, about["rounds"] + 1):
            # The first of a round is another one each time, so that none always follows the same one.
            turn = (number - 1) % len(systems)
            order = [*systems[turn:], *systems[:turn]]
            for part, durability, parts in _parts(about["size"], chosen):
                for system in order:
                    Session(
                        results,
                        system,
                        durability,
                        parts,
                        size=about["size"],
                        round_number=number,
                        part=part,
                        folder=Path(folder) / "server",
                        tell=_tell,
                    ).run()
        results.document["ended"] = _now()
        results.save()
    return results


def _parts(size: Size, chosen: Sequence[Workload]) -> list[tuple[str, Durability, list[Workload]]]:
    """The sessions of each system in a round: those of each part of the workloads; only a full run fills and restarts a
    server of its own.
    """
    of: dict[str, list[Workload]] = {name: [one for one in chosen if one.part == name] for name in get_args(Part)}
    memory = of["main"] if size == "full" else [*of["main"], *of.pop("restart")]
    main: list[tuple[str, Durability, list[Workload]]] = [
        ("main", "memory", memory),
        ("main", "flushed", of.pop("main")),
    ]
    return [*main, *((name, durability, of[name]) for name in of for durability in BOTH)]


def _results(options: argparse.Namespace, arguments: Sequence[str], folder: Path) -> Results:
    """The document of the run to resume, else a new one."""
    if options.resume:
        return Results.load(options.resume)
    name = f"{datetime.now(UTC):%Y-%m-%d-%H%M}-{options.size}"
    return Results.new(
        options.out or _RESULTS / name,
        command=shlex.join(["scripts/bench/run", *arguments]),
        started=_now(),
        machine=machine.describe(folder),
        options={"size": options.size, "rounds": options.rounds, "systems": options.systems, "only": options.only},
    )


def _present(results: Results, names: Sequence[str]) -> list[System]:
    """The systems that can run here, installed; why the others cannot is noted. Raises BenchError when none can."""
    present = []
    for name in names:
        about: dict[str, Any] = {}
        try:
            system = load(name)
            shown = system.name
            if reason := system.missing():
                raise BenchError(reason)
            system.install()
            about["version"] = system.version
            about["settings"] = {durability: system.settings(durability) for durability in BOTH}
            present.append(system)
        except (ImportError, BenchError) as error:
            shown = SYSTEMS[name].rpartition(":")[2]
            about["missing"] = str(error)
            _tell(f"{shown} is left out: {error}")
        results.document["systems"][shown] = about
        results.save()
    if not present:
        raise BenchError("none of the systems can run here")
    return present


def _chosen(size: Size, only: Sequence[str] | None) -> list[Workload]:
    if only is None:
        return [*workloads(size), RESTART]
    # A named workload is measured as in the full run, together with the workload that it reads.
    needed = {*only, *(one.reads for one in workloads("full") if one.name in only)}
    return [one for one in (*workloads("full"), RESTART) if one.name in needed]


def _names(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is unknown; the names are {', '.join(known)}")
        return names

    return parse


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _tell(text: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - _started), 60)
    print(f"{minutes:3d}:{seconds:02d} {text}", file=sys.stderr, flush=True)


def _interrupted(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
