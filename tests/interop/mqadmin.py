"""RocketMQ's mqadmin: the Java program AdminTool in ``java/``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

_FLAGS = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-Xshare:auto", "-Dfile.encoding=UTF-8"]


class Admin:
    """One JVM that runs commands of mqadmin."""

    def __init__(self, class_path: str, home: Path) -> None:
        command = ["java", *_FLAGS, f"-Dinterop.log={home / 'admin.log'}", f"-Duser.home={home}"]
        command += [f"-Djava.io.tmpdir={home}", "-cp", class_path, "commitmq.interop.AdminTool"]
        self._command = command
        self._begin()

    def _begin(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return bytes.fromhex(json.loads(line)["ok"]).decode()
        raise AssertionError("mqadmin ended")

    def run(self, command: str) -> str:
        """What the command printed."""
        assert self._process.stdin is not None
        self._process.stdin.write("\t".join(command.split()) + "\n")
        self._process.stdin.flush()
        return self._read()

    def restart(self) -> None:
        """In another JVM: some commands keep their clients, and with them the name server."""
        self.close()
        self._begin()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
