"""``commitmq support bundle``: what an operator who helps needs to know of a node, in one archive without its secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from commitmq.cli.node_verb import address_of, request
from commitmq.cli.options import folder_argument, json_option, timeout_option
from commitmq.cli.output import human_bytes, print_either
from commitmq.errors import CommitMQError, StoreError
from commitmq.files import atomic_file
from commitmq.store.access import require_store
from commitmq.store.layout import StoreLayout

LOG_BYTES = 4 << 20
_MAX_FILES = 100_000
_SECRETS = ("secret", "password", "token", "credential", "access_key", "private")
_PACKAGES = (
    "commitmq",
    "numpy",
    "pyzmq",
    "orjson",
    "isal",
    "click",
    "psutil",
    "cryptography",
    "prometheus-client",
)


@click.group()
def support() -> None:
    """Collect what helps to find a node's problem."""


@support.command()
@folder_argument
@click.option(
    "--to",
    "target",
    metavar="FILE",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Archive to make (.tar.gz).",
)
@timeout_option()
@json_option
def bundle(folder: Path, target: Path, timeout_s: float, as_json: bool) -> None:
    """Make an archive about the store DIR and its node, which may run or not.

    It holds status, findings of `commitmq doctor`, settings, the end of the log files, names and sizes of the store's
    files, and versions. It holds no message and no key, and values that look like secrets are omitted. Names of topics,
    groups and hosts are in it: read it before you give it away.

    \b
    Example: commitmq support bundle STORE --to node.tar.gz
    """
    layout = StoreLayout(folder.absolute())
    require_store(layout)
    if target.exists():
        raise StoreError("this exists already; a bundle overwrites nothing", path=target)
    parts = {"versions.json": _versions(), **_of_node(folder, timeout_s), "files.json": _files(layout.root)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, value in parts.items():
            _add(archive, name, json.dumps(redacted(value), indent=1, default=str).encode())
        for name, data in _logs(layout):
            _add(archive, name, data)
    size = packed.tell()
    try:
        atomic_file.replace(target, packed.getvalue(), "support", mode=0o600, hidden=True)
    except OSError as error:
        raise StoreError(f"the archive cannot be written: {error.strerror}", path=target) from error
    told = {"file": str(target), "bytes": size, "parts": sorted(parts), "node": "status.json" in parts}
    print_either(
        as_json,
        told,
        f"{target}: {human_bytes(size)}; read it before you give it away: names of topics and hosts are in it",
    )


def redacted(value: Any) -> Any:
    """``value`` without what looks like a secret: the values of keys that are named so."""
    if isinstance(value, dict):
        if any(word in str(value.get("key", "")).lower() for word in _SECRETS):
            return {**{name: redacted(one) for name, one in value.items()}, "value": "***"}
        return {
            name: "***" if any(word in str(name).lower() for word in _SECRETS) and one else redacted(one)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(one) for one in value]
    return value


def _of_node(folder: Path, timeout_s: float) -> dict[str, Any]:
    """What the node says; why it says nothing, when it does not."""
    from commitmq.cli.doctor import MAX_GROUPS, examine

    try:
        address = address_of(folder, None)
        parts = {
            "status.json": request(address, "status", timeout_s=timeout_s),
            "config.json": request(address, "config.show", timeout_s=timeout_s)["settings"],
        }
        return {**parts, "doctor.json": examine(address, MAX_GROUPS, timeout_s)}
    except SystemExit:
        return {"no_node.json": "no node runs on this store"}
    except CommitMQError as error:
        return {"no_node.json": str(error)}


def _versions() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": os.cpu_count(),
        "packages": packages,
    }


def _files(root: Path) -> dict[str, Any]:
    """Names, sizes, times and modes of the store's files; the first of them when there are very many."""
    found: list[list[Any]] = []
    usage = shutil.disk_usage(root)
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            if len(found) >= _MAX_FILES:
                break
            path = Path(folder, name)
            try:
                state = path.lstat()
            except OSError:
                continue
            row = [
                str(path.relative_to(root)),
                state.st_size,
                state.st_blocks * 512,
                int(state.st_mtime),
                oct(state.st_mode),
            ]
            found.append(row)
    return {
        "columns": ["file", "bytes", "disk_bytes", "changed_s", "mode"],
        "disk_total_bytes": usage.total,
        "disk_free_bytes": usage.free,
        "all": len(found) < _MAX_FILES,
        "files": found,
    }


def _logs(layout: StoreLayout) -> Iterator[tuple[str, bytes]]:
    """The ends of the log files, the newest first, :data:`LOG_BYTES` together."""
    left = LOG_BYTES
    older = [path for path in layout.own.glob("node.log.*") if path.suffix[1:].isdecimal()]
    for path in (layout.log, *sorted(older, key=lambda one: int(one.suffix[1:]))):
        if left <= 0:
            return
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - left))
                data = file.read(left)
        except OSError:
            continue
        left -= len(data)
        yield path.name, data


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(f"commitmq-support/{name}")
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
    archive.addfile(entry, io.BytesIO(data))
