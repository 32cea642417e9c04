"""``commitmq metrics``: the samples of a node's ``/metrics``, for a look without a Prometheus."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import click

from commitmq.cli.options import json_option, node_option, timeout_option
from commitmq.cli.output import complain, fail, print_json
from commitmq.supervision.exit_codes import CliExit

_ROLE = "worker-metrics"
_MOST_BYTES = 256 << 20
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \S+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@click.command()
@click.option(
    "--match",
    "pattern",
    metavar="REGEX",
    default="",
    help="Only samples that begin so, as commitmq_ or rocketmq_.*lag.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Where metrics.token_file asks for a token: its first line is sent.",
)
@timeout_option()
@json_option
@node_option
def metrics(pattern: str, token_file: Path | None, timeout_s: float, as_json: bool, node: str) -> None:
    """Print the samples of a node's /metrics.

    Each is one line, name{labels} and value. The node serves them with metrics.enable=true, also `commitmq start --metrics`.

    \b
    Example: commitmq metrics --match commitmq_group_lag_messages
    """
    from commitmq.client.admin import Admin

    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {error}", param_hint="--match") from None
    with Admin(node, timeout_s=timeout_s) as admin:
        rows = [row for row in admin.status()["processes"] if row["role"] == _ROLE]
    addresses = [str(one) for row in rows for one in row["endpoints"] or ()]
    if not rows:
        fail("this node serves no metrics: start it with --metrics, which sets metrics.enable=true")
    if not addresses:
        fail("the node's metrics have not started yet; `commitmq status` says why")
    address = _reachable(addresses[0], node)
    token = None if token_file is None else token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
    lines = [line for line in _page(address, token, timeout_s).splitlines() if line and not line.startswith("#")]
    found = [line for line in lines if wanted.match(line)]
    if as_json:
        print_json({"address": address, "samples": list(_samples(found))})
    else:
        for line in found:
            click.echo(line)
    if not found:
        complain(
            f"none of {len(lines)} samples begins with {pattern!r}" if pattern else f"{address} has no samples yet"
        )


def _reachable(address: str, node: str) -> str:
    """``address``, with the host of ``node`` where the metrics listen on all addresses of its machine."""
    parts = urlsplit(address)
    if parts.hostname not in ("0.0.0.0", "::"):
        return address
    host = urlsplit(node).hostname if node.startswith(("tcp://", "commitmq://")) else None
    host = host or "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{parts.port}"


def _page(address: str, token: str | None, timeout_s: float) -> str:
    """The text of ``/metrics``. Exits with a sentence where there is none."""
    from http.client import HTTPConnection, HTTPException

    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics", headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
    except (OSError, HTTPException, ValueError) as error:
        _unreachable(address, error)
    finally:
        connection.close()
    if answer.status == 401:
        fail(f"{address} asks for a token (metrics.token_file): --token-file FILE sends the first one of a file")
    if answer.status != 200:
        fail(f"{address} answered {answer.status}: {body[:200].decode(errors='replace').strip()}")
    return body.decode(errors="replace")


def _unreachable(address: str, error: Exception) -> NoReturn:
    why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    fail(
        f"no metrics from {address}: {why}. They are served there (metrics.host, metrics.port), and on loopback only this"
        " machine's own node can be asked",
        CliExit.NODE_UNAVAILABLE,
    )


def _samples(lines: list[str]) -> Iterator[dict[str, Any]]:
    """``name``, ``labels`` and ``value`` of each line; a value that is no number in JSON is its text."""
    for line in lines:
        if (found := _SAMPLE.fullmatch(line)) is None:
            continue
        name, labels, text = found.groups()
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        value: float | int | str = number if math.isfinite(number) else text
        if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
            value = int(value)
        pairs = {
            label: re.sub(r"\\.", lambda one: _ESCAPED.get(one[0], one[0]), escaped)
            for label, escaped in _LABEL.findall(labels or "")
        }
        yield {"name": name, "labels": pairs, "value": value}
