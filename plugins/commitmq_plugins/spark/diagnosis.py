"""Reports which prerequisites of the Spark plugin are installed: the work behind ``commitmq pipeline doctor``."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Final

from commitmq.errors import CommitMQError
from commitmq_plugins.spark.java import cache_folder, look

_PACKAGES: Final = (("pyspark", (4, 3)), ("pyarrow", (18,)), ("isal", (1, 7)))
_RUN_ROWS: Final = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked prerequisite. ``optional``: Spark runs without it."""

    what: str
    good: bool
    detail: str
    optional: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(*, run: bool = False) -> list[Finding]:
    """Check everything; with ``run`` also start Spark (some 10 seconds)."""
    findings = [_package(name, least) for name, least in _PACKAGES]
    findings += _javas()
    findings.append(Finding("python of the workers", True, sys.executable))
    try:
        findings.append(Finding("cache folder", True, str(cache_folder())))
    except OSError as error:
        findings.append(Finding("cache folder", False, str(error), optional=True))
    if run and all(one.good or one.optional for one in findings):
        findings.append(_run())
    return findings


def _package(name: str, least: tuple[int, ...]) -> Finding:
    wanted = ".".join(map(str, least))
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, False, f"not installed; {wanted} or newer is needed: pip install 'commitmq[spark]'")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)])
    if numbers < least:
        return Finding(name, False, f"version {version}; {wanted} or newer is needed")
    return Finding(name, True, f"version {version}")


def _javas() -> list[Finding]:
    """Every searched place, up to the Java that will be used."""
    findings = []
    for one in look():
        if one.java is not None and not one.trouble:
            findings.append(Finding("Java", True, f"version {one.java.version} of {one.place}: {one.java.home}"))
            return findings
        findings.append(Finding(f"Java of {one.place}", False, one.trouble, optional=True))
    findings.append(Finding("Java", False, "none of 17 or newer: pip install 'commitmq[spark]' brings one"))
    return findings


def _run() -> Finding:
    from commitmq_plugins.spark.sessions import QUICK_START, session

    try:
        spark = session("local[1]", app="commitmq pipeline doctor", **QUICK_START)
        try:
            counted = spark.range(_RUN_ROWS).count()
        finally:
            spark.stop()
    except (CommitMQError, RuntimeError, OSError) as error:
        return Finding("a Spark job", False, str(error))
    return Finding("a Spark job", counted == _RUN_ROWS, f"counted {counted} rows")
