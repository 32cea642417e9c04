"""A real Spark cluster on this machine: a standalone master and two workers, each with one core and one executor.

All of it listens on the loopback interface only. PySpark's wheel brings what runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyspark

from commitmq_plugins.spark.sessions import find_java
from nodes import free_ports

WORKERS = 2
_DEADLINE_S = 240
_DRIVER = Path(__file__).with_name("cluster_driver.py")
_PACKAGE = "org.apache.spark.deploy"


class Process:
    """One program, with all that it starts; ``log`` holds what it prints."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str], **pipes: Any) -> None:
        self.log = log
        with log.open("wb") as file:
            pipes.setdefault("stdout", file)
            self.popen = subprocess.Popen(command, stderr=file, env=environment, start_new_session=True, **pipes)

    def family(self) -> list[psutil.Process]:
        """It, its children and theirs, as far as they live."""
        with contextlib.suppress(psutil.Error):
            this = psutil.Process(self.popen.pid)
            return [this, *this.children(recursive=True)]
        return []

    def wait_until_logged(self, text: str) -> None:
        """Wait until it has printed ``text``."""
        deadline = time.monotonic() + _DEADLINE_S
        while text not in self.log.read_text(errors="replace"):
            assert self.popen.poll() is None, f"{self.log.name} has ended"
            assert time.monotonic() < deadline, f"{self.log.name} never says {text!r}"
            time.sleep(0.1)


class Driver:
    """A driver program on the cluster that does what it is asked; see cluster_driver.py."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def begin(self, function: str, *arguments: Any) -> None:
        """Ask, without waiting."""
        assert self._process.popen.stdin is not None
        self._process.popen.stdin.write(json.dumps([function, *arguments]).encode() + b"\n")
        self._process.popen.stdin.flush()

    def result(self) -> Any:
        """Wait for the answer. AssertionError has the driver's own traceback."""
        assert self._process.popen.stdout is not None
        line = self._process.popen.stdout.readline()
        assert line, "the driver has ended"
        answer = json.loads(line)
        assert "result" in answer, answer["error"]
        return answer["result"]

    def ask(self, function: str, *arguments: Any) -> Any:
        """Ask and wait."""
        self.begin(function, *arguments)
        return self.result()


class Cluster:
    """``url`` is what Spark calls the master. Made by :func:`start_cluster`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[Process] = []
        self._workers: list[Process] = []
        self.url = f"spark://127.0.0.1:{free_ports(1)}"

    def start(self) -> None:
        """Have a master and its workers ready."""
        port = self.url.rpartition(":")[2]
        master = self._daemon("master.Master", "master", "--port", port)
        master.wait_until_logged("I have been elected leader")
        for number in range(WORKERS):
            work = str(self._folder / f"work-{number}")
            limits = ["--cores", "1", "--memory", "1g"]
            self._workers.append(
                self._daemon("worker.Worker", f"worker-{number}", *limits, "--work-dir", work, self.url)
            )
        for worker in self._workers:
            worker.wait_until_logged("Successfully registered with master")

    def _daemon(self, name: str, log: str, *words: str) -> Process:
        home = Path(pyspark.__file__).parent
        # An environment of its own: what executors import must come from the session, not from here.
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self._folder),
            "JAVA_HOME": str(find_java().home),
            "SPARK_HOME": str(home),
            "SPARK_CONF_DIR": str(self._folder),
            "SPARK_LOCAL_DIRS": str(self._folder),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dspark.master.rest.enabled=false",
        }
        command = [str(home / "bin" / "spark-class"), f"{_PACKAGE}.{name}", "--host", "127.0.0.1", "--webui-port", "0"]
        return self._added(Process([*command, *words], self._folder / f"{log}.log", environment))

    def driver(self) -> Driver:
        """Start a driver program."""
        environment = {**os.environ, "SPARK_LOCAL_DIRS": str(self._folder)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, str(_DRIVER), self.url]
        return Driver(self._added(Process(command, self._folder / "driver.log", environment, **pipes)))

    def _added(self, process: Process) -> Process:
        self._processes.append(process)
        return process

    def executors(self) -> list[psutil.Process]:
        """The JVMs that run tasks."""
        return self._named("CoarseGrainedExecutorBackend")

    def python_workers(self) -> list[psutil.Process]:
        """The Python processes in which tasks run: what the daemon beside each executor has forked."""
        daemons = {one.pid for one in self._named("pyspark.daemon")}
        return [one for one in self._named("pyspark.daemon") if one.ppid() in daemons]

    def _named(self, word: str) -> list[psutil.Process]:
        found = []
        for worker in self._workers:
            for one in worker.family():
                with contextlib.suppress(psutil.Error):
                    if any(word in part for part in one.cmdline()):
                        found.append(one)
        return found

    def end(self) -> None:
        """Kill everything, by pid: halted first, so that nothing starts anything meanwhile."""
        family = [one for process in self._processes for one in process.family()]
        for act in (psutil.Process.suspend, psutil.Process.kill):
            for one in family:
                with contextlib.suppress(psutil.Error):
                    act(one)
        for process in self._processes:
            process.popen.wait(60)
            for pipe in (process.popen.stdin, process.popen.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        _, left = psutil.wait_procs(family, timeout=60)
        assert not left, f"still there: {left}"

    def logs(self) -> str:
        """The end of every log, for failures."""
        paths = [*self._folder.glob("*.log"), *self._folder.glob("work-*/*/*/stderr")]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(paths))


@contextlib.contextmanager
def start_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster that is ready; nothing of it is left at the end."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    except BaseException as error:
        error.add_note(cluster.logs())
        raise
    finally:
        cluster.end()
