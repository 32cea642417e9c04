"""Runs RocketMQ's own store classes on a store root, through the small Java program in ``java/``."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_RUN_TIMEOUT_S = 100
# These processes live for seconds: the first compiler tier and the plainest collector start fastest.
_JVM_FLAGS = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-Xshare:auto", "-Dfile.encoding=UTF-8"]

# The golden stores' settings (specification, section 17). Small files, so that a few hundred messages need several.
SETTINGS = {
    "mappedFileSizeCommitLog": 131072,
    "mappedFileSizeConsumeQueue": 1000,
    "maxHashSlotNum": 200,
    "maxIndexNum": 500,
    "flushDiskType": "SYNC_FLUSH",
}

# What RocketMQ logs at WARN on every healthy store. Anything else is a complaint.
_USUAL = re.compile(
    r"No resource file with name"
    r"|Load default HA Service"
    # The zeros behind the last record; every recovery ends there.
    r"|found a illegal magic code 0x0$"
    # Logged whenever the queues reach the log's end, which after any orderly stop they do.
    r"|maxPhyOffsetOfConsumeQueue\((\d+)\) >= processOffset\(\1\), truncate dirty logic files"
    # A queue whose last file is exactly full, asked for its next message; RocketMQ says so of its own queues too.
    r"|Offset not matched. Request offset: (\d+), firstOffset: 0, lastOffset: \2,"
    # An index file is full and the next one begins.
    r"|Over index file capacity: index count = (\d+); index max num = \3$"
    r"|Index file \[.*\] is full, trying to create another one"
    r"|interrupted, (this may caused|possibly) by shutdown"
    # What RocketMQ says of a slow machine.
    r"|DefaultMessageStore#putMessage: CommitLog#putMessage cost \d+ms"
)


@dataclass(frozen=True)
class Run:
    """What one run of the Java program said."""

    lines: list[dict[str, Any]]
    report: dict[str, Any]
    complaints: list[str] = field(default_factory=list)

    @property
    def recovered(self) -> dict[str, Any]:
        """Bounds of log and queues right after RocketMQ's recovery."""
        return dict(self.report["recovered"])

    @property
    def queues(self) -> dict[tuple[str, int], tuple[int, int, int]]:
        """By (topic, queue): min and max queue offset and end of the last message, right after recovery."""
        return {(one[0], one[1]): (one[2], one[3], one[4]) for one in self.recovered["queues"]}


class RocketMQRefusedError(AssertionError):
    """RocketMQ could not open or serve the store; the text is its own."""


def run(
    class_path: str,
    root: Path,
    *arguments: str,
    settings: dict[str, Any] | None = None,
    options: tuple[str, ...] = (),
) -> Run:
    """Open ``root`` as a broker with ``SETTINGS`` and ``settings`` does and run one verb of StoreTool on it.

    Raises RocketMQRefusedError with RocketMQ's own words when it does not end well.
    """
    # Beside the store, never in it: the store's folder must hold nothing that a node did not put there.
    report, log = (root.with_name(f"{root.name}.{name}") for name in ("report.json", "rocketmq.log"))
    for path in (report, log):
        path.unlink(missing_ok=True)
    command = ["java", *_JVM_FLAGS, f"-Dinterop.log={log}", f"-Duser.home={root.parent}", "-cp", class_path]
    command += ["commitmq.interop.StoreTool", str(root)]
    for key, value in {**SETTINGS, **(settings or {})}.items():
        command += ["--set", f"{key}={value}"]
    command += ["--report", str(report), *options, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=_RUN_TIMEOUT_S, check=False
    )
    said = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    if done.returncode:
        raise RocketMQRefusedError("\n".join([f"{' '.join(arguments)} on {root}:", done.stderr[-3000:], *said[-40:]]))
    complaints = [line for line in said if not _USUAL.search(line)]
    told = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return Run([json.loads(line) for line in done.stdout.splitlines()], told, complaints)


def run_each(
    class_path: str, roots: dict[Path, tuple[str, ...]], *, settings: dict[str, Any] | None = None
) -> dict[Path, Run]:
    """As :func:`run`, for many stores in one process: by root, the words of a verb. What fails fails for its store only:
    its ``report`` then has ``failed``, RocketMQ's own words. ``complaints`` are those that name the store's folder.
    """
    folder = next(iter(roots)).parent
    log, work = folder / "each.log", folder / "each.tsv"
    log.unlink(missing_ok=True)
    sets = [word for key, value in {**SETTINGS, **(settings or {})}.items() for word in ("--set", f"{key}={value}")]
    lines = []
    for root, words in roots.items():
        report, output = (root.with_name(f"{root.name}.{name}") for name in ("report.json", "jsonl"))
        for path in (report, output, Path(f"{output}.failed")):
            path.unlink(missing_ok=True)
        lines.append("\t".join([str(output), str(root), *sets, "--report", str(report), *words]))
    work.write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        ["java", *_JVM_FLAGS, f"-Dinterop.log={log}", f"-Duser.home={folder}", "-cp", class_path,
         "commitmq.interop.StoreTool", "--each", str(work)],
        capture_output=True, text=True, encoding="utf-8", timeout=_RUN_TIMEOUT_S + 10 * len(roots), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in log.read_text(encoding="utf-8").splitlines() if not _USUAL.search(line)]
    found = {}
    for root in roots:
        report, output = (root.with_name(f"{root.name}.{name}") for name in ("report.json", "jsonl"))
        failed = Path(f"{output}.failed")
        told = (
            {"failed": failed.read_text(encoding="utf-8")} if failed.exists() else json.loads(report.read_text("utf-8"))
        )
        read = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        found[root] = Run(read, told, [line for line in said if str(root) in line])
    return found


def judge(class_path: str, cases: Iterable[tuple[str, list[dict[str, str]]]]) -> list[dict[str, Any]]:
    """Have RocketMQ's filter classes judge the messages (their properties) of each ``(expression, messages)``.

    Each answer has ``refused`` (why) or ``matches`` and ``values``, one for each message.
    """
    lines = [json.dumps({"expression": expression, "messages": messages}) for expression, messages in cases]
    done = subprocess.run(
        ["java", *_JVM_FLAGS, "-Dinterop.log=/dev/null", "-cp", class_path, "commitmq.interop.FilterTool"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_RUN_TIMEOUT_S,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(lines), done.stderr[-3000:]
    return answers


def subscriptions(class_path: str, path: Path) -> list[dict[str, Any]]:
    """What RocketMQ's ConsumerFilterManager makes of the ``consumerFilter.json`` at ``path``."""
    done = subprocess.run(
        ["java", *_JVM_FLAGS, "-Dinterop.log=/dev/null", "-cp", class_path, "commitmq.interop.FilterTool", str(path)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_RUN_TIMEOUT_S,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
