"""RocketMQ's programs by the Java tools in ``java/``: a whole broker on a store root (BrokerTool), clients (ClientTool)."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import rocketmq

_START_S = 90.0
_ANSWER_S = 60.0
_FLAGS = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx512m", "-Xshare:auto", "-Dfile.encoding=UTF-8"]


class RefusedError(Exception):
    """A client's exception; the text is RocketMQ's."""


class Tool:
    """A Java program that answers each line with a line. :meth:`kill` ends it as a crash does."""

    def __init__(self, command: list[str], home: Path) -> None:
        """``command``: class path, class and arguments. Returns when it is ready. RocketMQ writes below ``home``."""
        self.log = home.with_suffix(".log")
        self._home = home
        home.mkdir(exist_ok=True)  # RocketMQ's clients, logs and tools write below the home folder
        options = [f"-Dinterop.log={self.log}", f"-Duser.home={home}", f"-Djava.io.tmpdir={home}"]
        self._errors = home.with_suffix(".err")
        for left in (2, 1, 0):
            try:
                self._begin(["java", *_FLAGS, *options, *command])
                break
            except AssertionError as error:
                # The program looks for free ports first, and another test may take one in between.
                if "Failed to bind" not in str(error) or not left:
                    raise
                self._process.kill()
                self._process.wait()

    def _begin(self, command: list[str]) -> None:
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=self._home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, args=(self._process, self._answers), daemon=True)
        self._listener.start()
        self._answer(_START_S)

    @staticmethod
    def _listen(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # a library may print, too
                answers.put(line)
        answers.put('{"failed":"it ended"}')

    def ask(self, *words: object) -> Any:
        """The answer to a command. Raises AssertionError with RocketMQ's words, RefusedError with those of a client."""
        assert self._process.stdin is not None
        self._process.stdin.write("\t".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._answer(_ANSWER_S)

    def _answer(self, timeout_s: float) -> Any:
        try:
            answer = json.loads(self._answers.get(timeout=timeout_s))
        except queue.Empty:
            answer = {"failed": f"no answer within {timeout_s} s"}
        if "failed" in answer:
            self.kill()
            raise AssertionError(f"{answer['failed']}\n{self._errors.read_text(encoding='utf-8')[-4000:]}")
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer["ok"]

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
        """The first true value of ``condition``."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
            time.sleep(0.1)
        return found

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None and error is None:
            self.ask("quit")
            assert self._process.wait(_ANSWER_S) == 0
        self.kill()


class Broker(Tool):
    """One broker. Leaving the block shuts it down in order; :meth:`kill` ends it as a crash does."""

    def __init__(self, class_path: str, root: Path, **settings: Any) -> None:
        """Start it; returns when its log is dispatched. ``settings`` are keys of broker.conf beside the golden stores'."""
        command = ["-cp", class_path, "commitmq.interop.BrokerTool", str(root)]
        for key, value in {**rocketmq.SETTINGS, **settings}.items():
            command += ["--set", f"{key}={value}"]
        super().__init__(command, root.with_name(f"{root.name}.broker"))

    def bodies(self, topic: str) -> list[bytes]:
        """The bodies of all visible messages of ``topic``."""
        return [bytes.fromhex(one["body_hex"]) for one in self.ask("read", topic)]


class ClientTool(Tool):
    """RocketMQ's clients, and a name server on ``port`` with which the broker at ``address`` registers."""

    def __init__(self, class_path: str, folder: Path, port: int, address: str, broker: str = "commitmq") -> None:
        command = ["-cp", class_path, "commitmq.interop.ClientTool", str(port), broker, address]
        super().__init__(command, folder / "clients")


class ClusterTool(Tool):
    """RocketMQ's producer and consumers of a cluster, and with ``serves`` its name server at ``address``."""

    def __init__(self, class_path: str, folder: Path, address: str, *, serves: bool) -> None:
        command = ["-cp", class_path, "commitmq.interop.ClusterTool", address, *(["serve"] if serves else [])]
        super().__init__(command, folder / "cluster")
