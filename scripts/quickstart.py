"""CommitMQ in one minute: start a node, send it a month of real flights, read them back, ask Spark about them, stop it.

Run through scripts/quickstart, which prepares the environment. Leaves nothing behind: the node has a temporary folder,
and every end of the script stops it, also Ctrl-C. With --keep it stays, and the last lines tell how to use it.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import psutil
from rich.console import Console
from rich.table import Table

from commitmq import Admin, Consumer, Message, Producer

FLIGHTS = Path(__file__).resolve().parent / "data" / "flights-2013-01.csv.gz"
COMMITMQ = Path(sys.executable).with_name("commitmq")
TOPIC = "flights"
GROUP = "punctuality"
BATCH_MESSAGES = 1_000
PATIENCE_S = 60.0
EXIT_NO_NODE = 69  # of `commitmq stop`, when no node runs on the store

console = Console(highlight=False, soft_wrap=True)


def main(arguments: list[str]) -> int:
    """The whole tour; returns 0 when every flight came back."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, interrupted)
    signal.signal(signal.SIGHUP, interrupted)
    try:
        flights = load_flights(options.rows)
        with temporary_node(keep=options.keep) as (store, address):
            send(address, flights)
            receive(address, flights)
            receive_some(address, flights)
            show_files(store)
            ask_spark(store, flights)
            if options.keep:
                show_what_next(store, address)
    except KeyboardInterrupt:
        console.print("interrupted", style="red")
        return 130
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the node running and say how to talk to it")
    parser.add_argument("--rows", type=int, metavar="N", help="send only the first N flights (default: all 27,004)")
    options = parser.parse_args(arguments)
    if options.rows is not None and options.rows < 1:
        parser.error("--rows must be at least 1")
    return options


def interrupted(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


# ---------------------------------------------------------------- the node


@contextmanager
def temporary_node(*, keep: bool) -> Iterator[tuple[Path, str]]:
    """A node on a new folder, as (store folder, address). It is stopped and removed afterwards, unless --keep is given."""
    store = Path(tempfile.mkdtemp(prefix="commitmq-quickstart-"))
    heading(f"start a node on {store}")
    processes: list[psutil.Process] = []
    try:
        run("start", "--background", "--store", store, "--profile", "dev", "--set", "network.port=0")
        status = json.loads(run("status", "--store", store, "--json", show=False))
        # Noted now: psutil keeps start times with the pids, so that a later search finds these processes only.
        processes = [psutil.Process(row["pid"]) for row in status["processes"] if row["pid"]]
        console.print(f"{len(processes)} processes: " + ", ".join(r["role"] for r in status["processes"] if r["pid"]))
        yield store, status["node"]["admin"][0]
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            # A second Ctrl-C must not leave half a node behind.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            stop(store, processes)


def stop(store: Path, processes: list[psutil.Process]) -> None:
    """Stop the node, make sure that it is gone, remove its folder."""
    heading("stop the node")
    try:
        run("stop", "--store", store)
    except subprocess.CalledProcessError as error:
        if error.returncode != EXIT_NO_NODE:  # an interrupted start has already taken its node back
            console.print("the node did not stop in order", style="red")
    _, left = psutil.wait_procs(processes, timeout=5)
    for process in left:
        console.print(f"{process} was still running and is ended", style="red")
        process.kill()
    shutil.rmtree(store, ignore_errors=True)
    if left:
        sys.exit(1)
    console.print("nothing is left running" + ("" if store.exists() else f", {store} is removed"))


def run(*arguments: object, show: bool = True) -> str:
    """Run ``commitmq`` with ``arguments`` and return its output. Raises CalledProcessError."""
    # A session of its own: Ctrl-C must reach this script only, which then stops the node in order.
    command = [str(COMMITMQ), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            # An interrupted start ends the processes that it has started; a killed start would leave a node that comes
            # up later.
            process.send_signal(signal.SIGINT)
            process.wait(timeout=PATIENCE_S)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    if show:
        console.print(f"[dim]$ commitmq {' '.join(command[1:])}[/dim]\n{output.rstrip()}")
    return output


# ---------------------------------------------------------------- the data


def load_flights(limit: int | None) -> list[Message]:
    """One message a flight: a JSON body, the airport it leaves from as its tag, airline, number and day as its key."""
    heading("read the data set")
    flights = []
    with gzip.open(FLIGHTS, "rt", encoding="ascii", newline="") as file:
        for row in csv.DictReader(file):
            key = f"{row['carrier']}{row['flight']}@{row['year']}-{int(row['month']):02}-{int(row['day']):02}"
            flights.append(Message(json.dumps(row).encode(), tags=row["origin"], keys=key))
            if len(flights) == limit:
                break
    console.print(f"{len(flights):,} flights that were to leave New York City in January 2013 ({FLIGHTS.name})")
    return flights


# ---------------------------------------------------------------- send and receive


def send(address: str, flights: list[Message]) -> None:
    """Send all flights in batches; each send returns once its batch is on the device."""
    heading(f"send {len(flights):,} flights to the topic {TOPIC!r}")
    started = time.perf_counter()
    with Producer(address) as producer:
        for first in range(0, len(flights), BATCH_MESSAGES):
            results = producer.send_batch(TOPIC, flights[first : first + BATCH_MESSAGES])
    report_rate("stored and flushed", len(flights), time.perf_counter() - started)
    last = results[-1]
    console.print(f"the last one is queue {last.queue}, offset {last.queue_offset}; its message id is {last.msg_id}")


def receive(address: str, flights: list[Message]) -> None:
    """Read everything as a consumer group, sum up delays by airline, commit the position, and look at the lag."""
    heading(f"read them as the consumer group {GROUP!r}")
    missing = {(message.keys[0], message.body) for message in flights}
    delays: dict[str, list[int]] = {}
    sample: Message | None = None
    received = 0
    started = time.perf_counter()
    with Consumer(TOPIC, group=GROUP, node=address, start="earliest") as consumer:
        deadline = time.monotonic() + PATIENCE_S
        while received < len(flights) and time.monotonic() < deadline:
            for message in consumer.poll(timeout_s=1.0):
                received += 1
                flight = json.loads(message.body)
                if flight["dep_delay"] != "NA":
                    delays.setdefault(flight["carrier"], []).append(int(flight["dep_delay"]))
                missing.discard((message.keys[0], message.body))
                sample = sample or message
        seconds = time.perf_counter() - started
        consumer.commit()
    report_rate("joined the group, read and decoded", received, seconds)
    if missing or received != len(flights) or sample is None:
        sys.exit(f"{received:,} messages came back, {len(missing):,} of {len(flights):,} flights are missing")
    show_message(sample)
    show_delays(delays)
    with Admin(address) as admin:
        show_lag(admin)


def receive_some(address: str, flights: list[Message]) -> None:
    """The node filters by tag: only the flights of one airport leave it."""
    heading("read only the flights from JFK, filtered by the node")
    wanted = sum(message.tags == "JFK" for message in flights)
    received = 0
    with Consumer(TOPIC, group="jfk-only", node=address, start="earliest", filter="JFK") as consumer:
        deadline = time.monotonic() + PATIENCE_S
        while received < wanted and time.monotonic() < deadline:
            received += sum(message.tags == "JFK" for message in consumer.poll(timeout_s=1.0))
    console.print(f"{received:,} of {len(flights):,} messages")
    if received != wanted:
        sys.exit(f"{wanted:,} flights left from JFK")


# ---------------------------------------------------------------- what is shown


def heading(text: str) -> None:
    console.print(f"\n[bold cyan]▸ {text}[/bold cyan]")


def show_table(table: Table, title: str = "") -> None:
    console.print(*([f"\n{title}"] if title else []), table, sep="\n", soft_wrap=False)


def report_rate(what: str, count: int, seconds: float) -> None:
    console.print(f"{what}: {count:,} messages in {seconds:.2f} s, {count / seconds:,.0f} a second")


def show_message(message: Message) -> None:
    """Every field of one message."""
    table = Table("field", "value", show_edge=False)
    fields: dict[str, Any] = {
        "topic, queue": f"{message.topic}, {message.queue_id}",
        "queue offset": message.queue_offset,
        "physical offset": message.physical_offset,
        "stored at": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(message.store_timestamp / 1000)) + " UTC",
        "tag": message.tags,
        "key": message.keys[0],
        "body": message.body.decode(),
    }
    for name, value in fields.items():
        table.add_row(name, str(value))
    show_table(table, "one of the messages")


def show_delays(delays: dict[str, list[int]]) -> None:
    """The mean departure delay of the busiest airlines."""
    table = Table(show_edge=False)
    for name in ("airline", "flights", "mean minutes late"):
        table.add_column(name, justify="left" if name == "airline" else "right")
    for carrier, minutes in sorted(delays.items(), key=lambda item: -len(item[1]))[:5]:
        table.add_row(carrier, f"{len(minutes):,}", f"{sum(minutes) / len(minutes):.1f}")
    show_table(table, "how late they left")


def show_lag(admin: Admin) -> None:
    """The group's offset in each queue: committed offsets outlive the consumer and the node."""
    table = Table(show_edge=False)
    for name in ("queue", "committed", "end", "lag"):
        table.add_column(name, justify="right")
    rows = admin.group_lag(GROUP)
    for row in rows:
        table.add_row(str(row.queue), f"{row.committed or 0:,}", f"{row.end:,}", f"{row.lag:,}")
    show_table(table, "where the group stands now")
    if sum(row.lag for row in rows):
        sys.exit("the group has read everything, and still lags behind")


def show_files(store: Path) -> None:
    """The files of the store, at RocketMQ's places."""
    heading("the files on disk, in RocketMQ's format")
    table = Table(show_edge=False)
    for name in ("file", "size", "on disk"):
        table.add_column(name, justify="left" if name == "file" else "right")
    for path in sorted(store.rglob("*")):
        if path.is_file() and path.relative_to(store).parts[0] not in ("run", "commitmq"):
            facts = path.stat()
            table.add_row(str(path.relative_to(store)), f"{facts.st_size:,}", f"{facts.st_blocks * 512:,}")
    show_table(table)


# ---------------------------------------------------------------- Spark


def ask_spark(store: Path, flights: list[Message]) -> None:
    """A question to the store's files, answered by a Spark job while the node runs: when is it best to leave?"""
    from pyspark import SparkContext
    from pyspark.sql import functions as f

    from commitmq_plugins.spark.sessions import QUICK_START, find_java, session

    heading("ask Spark, which reads the files themselves: at which time of the day do flights leave late?")
    java = find_java()
    console.print(f"Java {java.version}, {java.origin}; Spark takes about ten seconds to start", style="dim")
    started = time.perf_counter()
    spark = session("local[2]", app="quickstart", **QUICK_START)
    try:
        log = spark.read.format("commitmq").schema("tags string, body binary").option("store", str(store))
        flight = f.from_json(f.col("body").cast("string"), "hour string, dep_delay string")
        rows = (
            log.option("topics", TOPIC)
            .load()
            .select(f.col("tags").alias("airport"), flight.alias("flight"))
            .withColumn("block", f.floor(f.col("flight.hour").cast("int") / 3) * 3)
            .withColumn("late", f.expr("try_cast(flight.dep_delay AS int)") > 15)
            .groupBy("block", "airport")
            .agg(f.count("*").alias("flights"), f.avg(f.col("late").cast("double")).alias("late"))
            .collect()
        )
        show_lateness([(int(row.block), str(row.airport), int(row.flights), float(row.late or 0)) for row in rows])
        counted = sum(int(row.flights) for row in rows)
    finally:
        gateway = SparkContext._gateway
        spark.stop()
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()  # the JVM ends with its standard input
            gateway.proc.wait(timeout=PATIENCE_S)
    report_rate("Spark started, and read and grouped", counted, time.perf_counter() - started)
    if counted != len(flights):
        sys.exit(f"Spark counted {counted:,} of {len(flights):,} flights")


def show_lateness(cells: list[tuple[int, str, int, float]]) -> None:
    """Share of flights more than a quarter of an hour late, by three hours of the day and airport."""
    airports = sorted({airport for _, airport, _, _ in cells})
    share = {(block, airport): late for block, airport, _, late in cells}
    table = Table(show_edge=False)
    table.add_column("planned to leave")
    for airport in airports:
        table.add_column(airport, justify="right")
    for block in sorted({block for block, *_ in cells}):
        row = (f"{share[block, one]:.0%}" if (block, one) in share else "" for one in airports)
        table.add_row(f"{block:02}:00 to {block + 2:02}:59", *row)
    show_table(table, "left more than 15 minutes late")


def show_what_next(store: Path, address: str) -> None:
    """How to use a node that was kept."""
    heading("the node stays; talk to it like this")
    here = os.path.relpath(COMMITMQ)
    command = here if not here.startswith("..") else str(COMMITMQ)
    console.print(
        f"{command} status --node {address}\n"
        f"{command} consume {TOPIC} --node {address} --from earliest --limit 3\n"
        f"echo hello | {command} produce greetings --node {address}\n"
        f"{command} stop --store {store}"
    )
    console.print(f"stopping keeps the messages; remove {store} when you are done")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
