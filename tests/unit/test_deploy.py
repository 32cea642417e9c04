"""Goal: image, manifests and unit agree with each other and with the node: account, folders, ports, settings, time limits.

Method: the files are read as what they are (YAML, lines of a Containerfile), and their settings are given to the node's own
reader of settings. ``test_systemd``, ``test_image`` and ``test_pod`` run a node by them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from commitmq.config import load
from commitmq.network.ports import PORTS
from commitmq.security.start_rule import Listener
from commitmq.supervision.exit_codes import StartFailed
from commitmq.supervision.exposure import Exposure
from nodes import environment
from pod import MANIFESTS, container, first_container, manifest, pod, variables

PROJECT = Path(__file__).resolve().parents[2]
DEPLOY = PROJECT / "deploy"


def instructions(word: str) -> list[str]:
    """The arguments of each instruction of that name in the last stage of the Containerfile."""
    text = (DEPLOY / "image" / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    last_stage = text[text.rindex("\nFROM ") :]
    return [" ".join(one.split()) for one in re.findall(rf"^{word} (.+)$", last_stage, re.MULTILINE)]


def settings_of_the_pod() -> Any:
    return load(None, environment=variables())


# ---------------------------------------------------------------- Kubernetes and the image


def test_each_manifest_is_named_by_the_kustomization() -> None:
    text = (MANIFESTS / "kustomization.yaml").read_text(encoding="utf-8")
    named = set(manifest("kustomization")["resources"]) | set(re.findall(r"#   - (\w+\.yaml)", text))
    assert named == {path.name for path in MANIFESTS.iterdir()} - {"kustomization.yaml"}


def test_the_account_is_that_of_the_image() -> None:
    (user,) = instructions("USER")
    context = pod()["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}" == "10001:10001"
    assert context["fsGroup"] == context["runAsGroup"]
    assert f"x:{context['runAsUser']}:{context['runAsGroup']}:" in " ".join(instructions("RUN"))


def test_the_pod_meets_the_restricted_standard() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, whose fields these are."""
    context, own = pod()["securityContext"], container()["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod()["automountServiceAccountToken"] is False
    assert all(set(one) & {"emptyDir"} for one in pod()["volumes"])


def test_folders_and_command_are_those_of_the_image() -> None:
    (volume,) = instructions("VOLUME")
    command = instructions("CMD")[-1]
    arguments = container()["args"]
    assert yaml.safe_load(command) == arguments
    assert arguments[:2] == ["start", "--store"]
    assert Path(arguments[2]).is_relative_to(volume)
    mounts = {one["name"]: one["mountPath"] for one in container()["volumeMounts"]}
    (claim,) = manifest("statefulset")["spec"]["volumeClaimTemplates"]
    assert mounts.pop(claim["metadata"]["name"]) == volume
    assert mounts == {"tmp": "/tmp", "shm": "/dev/shm"}
    assert set(mounts) == {one["name"] for one in pod()["volumes"]}


def test_ports_are_those_of_the_settings() -> None:
    config = settings_of_the_pod()
    ports = {one["name"]: one["containerPort"] for one in container()["ports"]}
    assert ports == {"commitmq": config.network.port, "metrics": config.metrics.port}
    assert {one["name"]: one["port"] for one in manifest("service")["spec"]["ports"]} == ports
    assert instructions("EXPOSE") == [" ".join(str(port) for port in ports.values())]
    clients, prometheus = (one["ports"] for one in manifest("networkpolicy")["spec"]["ingress"])
    (block,) = clients
    assert (block["port"], block["endPort"]) == (config.network.port, config.network.port + PORTS - 1)
    assert [one["port"] for one in prometheus] == [config.metrics.port]
    (endpoint,) = manifest("podmonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        (url,) = re.findall(r"http://[^']+", container()[probe]["exec"]["command"][-1])
        assert url.startswith(f"http://127.0.0.1:{config.metrics.port}/health/")
    (check,) = re.findall(r"http://[^']+", instructions("HEALTHCHECK")[0])
    assert check == f"http://127.0.0.1:{config.metrics.port}/health/ready"


def test_only_the_metrics_have_no_password(tmp_path: Path) -> None:
    """By the node's own start rule, on a store as the pod's first container leaves it."""
    config, store = settings_of_the_pod(), tmp_path / "store"
    assert (config.network.host, config.metrics.host) == ("0.0.0.0", "0.0.0.0")
    assert config.security.insecure_listeners == "metrics"
    with pytest.raises(StartFailed, match="native on 0"):
        Exposure.of_node(config, store)
    for _ in range(2):
        subprocess.run(first_container(store), check=True, env=environment(), capture_output=True)
    exposure = Exposure.of_node(config, store)
    assert exposure.listeners == []
    exposure.check([Listener("metrics", config.metrics.host, False, False)])
    assert exposure.listeners == ["metrics"]


def test_the_image_alone_listens_on_loopback() -> None:
    pairs = [pair.split("=", 1) for pair in instructions("ENV")[0].split()]
    config = load(None, environment=dict(pairs))
    assert (config.network.host, config.metrics.host, config.metrics.enable) == ("127.0.0.1", "127.0.0.1", True)


def test_a_recovering_node_is_not_killed_and_a_draining_one_not_early() -> None:
    startup = container()["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
    assert pod()["terminationGracePeriodSeconds"] > load(None).supervisor.stop_timeout_s
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_labels_meet_their_selectors() -> None:
    labels = manifest("statefulset")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        manifest("statefulset")["spec"]["selector"]["matchLabels"],
        manifest("service")["spec"]["selector"],
        manifest("networkpolicy")["spec"]["podSelector"]["matchLabels"],
        manifest("podmonitor")["spec"]["selector"]["matchLabels"],
    ]
    assert selectors == [labels] * 4
    assert manifest("statefulset")["spec"]["serviceName"] == manifest("service")["metadata"]["name"]


def test_the_version_is_that_of_the_package() -> None:
    version = re.findall(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[
        0
    ]
    assert container()["image"] == f"commitmq:{version}"
    assert [one["newTag"] for one in manifest("kustomization")["images"]] == [version]


# ---------------------------------------------------------------- one disk, one memory


def test_the_shared_memory_is_within_the_pod_s() -> None:
    units = {"Mi": 1 << 20, "Gi": 1 << 30}

    def size(text: str) -> int:
        return int(text[:-2]) * units[text[-2:]]

    shm = next(one["emptyDir"]["sizeLimit"] for one in pod()["volumes"] if one["name"] == "shm")
    limit = size(container()["resources"]["limits"]["memory"])
    assert load(None).memory.budget_bytes < size(shm) < limit / 2
