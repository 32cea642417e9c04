"""The software bill of materials: what an environment holds, as CycloneDX 1.6 in JSON.

    python scripts/sbom.py FOLDER >commitmq.cdx.json        # of what pip installed into FOLDER with --target

A component is a distribution that is installed beside ``commitmq``, with its version, its licence as it declares it, its
package URL and the SHA-256 of its RECORD, which has the checksum of each of its files. ``dependencies`` has who requires whom.
The same environment gives the same bytes: names are sorted, and the serial number is made of the content.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ASK = """
import hashlib, json, sys
from importlib import metadata
found = []
folders = {"path": sys.argv[1:]} if sys.argv[1:] else {}
for one in metadata.distributions(**folders):
    fields = one.metadata.json
    record = one.read_text("RECORD") or ""
    licences = fields.get("license_expression") or fields.get("license") or ""
    classes = [text for text in fields.get("classifier", []) if text.startswith("License ::")]
    found.append({"name": fields["name"], "version": one.version, "licence": licences, "classes": classes,
                  "summary": fields.get("summary", ""), "requires": one.requires or [],
                  "sha256": hashlib.sha256(record.encode()).hexdigest()})
json.dump(found, sys.stdout)
"""


def installed(python: Path, *folders: Path) -> list[dict[str, Any]]:
    """What is installed in the environment of ``python``, or in ``folders``, as that Python reports it."""
    command = [str(python), "-I", "-c", _ASK, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    unique = {canonicalize_name(one["name"]): one for one in reversed(json.loads(done.stdout))}
    return [unique[name] for name in sorted(unique)]


def document(found: list[dict[str, Any]], root: str, extras: tuple[str, ...], epoch_s: int) -> bytes:
    """The bill of the distribution ``root`` with its ``extras``, made at ``epoch_s`` seconds since 1970."""
    by_name = {str(canonicalize_name(one["name"])): one for one in found}
    needed = _reachable(by_name, root, extras)
    components = {
        name: _component(by_name[name], "application" if name == root else "library") for name in sorted(needed)
    }
    main = components.pop(root)
    body: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch_s)),
            "component": main,
            "properties": [{"name": "commitmq:extras", "value": ",".join(extras)}],
        },
        "components": list(components.values()),
        "dependencies": [
            {"ref": _purl(by_name[name]), "dependsOn": [_purl(by_name[other]) for other in sorted(needed[name])]}
            for name in sorted(needed)
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    return json.dumps({**body, "serialNumber": f"urn:uuid:{serial}"}, indent=1, ensure_ascii=False).encode() + b"\n"


def _reachable(by_name: dict[str, dict[str, Any]], root: str, extras: tuple[str, ...]) -> dict[str, set[str]]:
    """Name to the names that it requires, from ``root`` on. Raises KeyError for a requirement that is not installed."""
    graph: dict[str, set[str]] = {}
    waiting = [(root, extras)]
    done = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        for text in by_name[name]["requires"]:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                other = str(canonicalize_name(requirement.name))
                if other != name:
                    graph.setdefault(name, set()).add(other)
                waiting.append((other, tuple(sorted(requirement.extras))))
        graph.setdefault(name, set())
    return graph


def _purl(one: dict[str, Any]) -> str:
    return f"pkg:pypi/{canonicalize_name(one['name'])}@{one['version']}"


def _component(one: dict[str, Any], kind: str) -> dict[str, Any]:
    licence = one["licence"].strip().partition("\n")[0]
    if not licence and one["classes"]:
        licence = "; ".join(text.rpartition(" :: ")[2] for text in one["classes"])
    component = {
        "type": kind,
        "bom-ref": _purl(one),
        "name": one["name"],
        "version": one["version"],
        "description": one["summary"],
        "purl": _purl(one),
        "properties": [{"name": "commitmq:record-sha256", "value": one["sha256"]}],
    }
    if licence:
        component["licenses"] = [{"license": {"name": licence}}]
    return component


if __name__ == "__main__":
    epoch_s = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    sys.stdout.buffer.write(
        document(installed(Path(sys.executable), Path(sys.argv[1])), "commitmq", ("node",), epoch_s)
    )
