"""The pod of ``deploy/kubernetes/statefulset.yaml``, as tests read it and run it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"


def manifest(name: str) -> dict[str, Any]:
    """The only document of ``name``.yaml."""
    documents = list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8")))
    assert len(documents) == 1
    found: dict[str, Any] = documents[0]
    return found


def pod() -> dict[str, Any]:
    found: dict[str, Any] = manifest("statefulset")["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    """The container of the node."""
    (found,) = pod()["containers"]
    return dict(found)


def variables() -> dict[str, str]:
    """The environment of the node's container."""
    return {one["name"]: one["value"] for one in container()["env"]}


def first_container(store: Path) -> list[str]:
    """What the pod's first container does, by the command of this environment, on ``store``."""
    (keys,) = pod()["initContainers"]
    assert keys["image"] == container()["image"]
    assert keys["securityContext"] == container()["securityContext"]
    shell, flag, text, path = keys["command"]
    assert (shell, flag, path) == ("sh", "-c", container()["args"][2])
    return ["sh", "-c", text.replace("commitmq ", f"{sys.executable} -m commitmq.cli.main "), str(store)]
