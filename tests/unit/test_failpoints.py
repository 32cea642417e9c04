"""Goal: a failpoint does exactly what its text says, at the hit it names, and a wrong text is refused.

Method: the parser is called here; what ends or stops a process runs in a process of its own.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.errors import ConfigError
from commitmq.workers.runtime.context import ExitCode


def run(points: str, code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from commitmq import failpoints\n{code}"],
        env={**os.environ, failpoints.VARIABLE: points, "PYTHONPATH": os.pathsep.join(sys.path), **extra},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_nothing_is_active_without_the_variable() -> None:
    assert not failpoints.ACTIVE
    failpoints.hit("writer.after_append")


def test_every_action_is_understood() -> None:
    points = failpoints.parse("a=kill@3; b=stop;c=delay:50ms;d=errno:ENOSPC@1;e=exit;f=delay:1.5s;g=delay:300us;")
    assert {name: point.action for name, point in points.items()} == {
        "a": "kill", "b": "stop", "c": "delay", "d": "errno", "e": "exit", "f": "delay", "g": "delay",
    }  # fmt: skip
    assert points["a"].at_hit == 3
    assert points["b"].at_hit == 0
    assert (points["c"].delay_s, points["f"].delay_s) == (0.05, 1.5)
    assert points["g"].delay_s == pytest.approx(0.0003)
    assert points["d"].errno == errno.ENOSPC


@pytest.mark.parametrize(
    "text",
    ["a", "a=", "=kill", "a=kil", "a=kill@", "a=kill@0", "a=kill@x", "a=delay", "a=delay:5", "a=errno:NO", "a=kill:1"],
)
def test_a_wrong_text_is_refused_with_itself(text: str) -> None:
    with pytest.raises(ConfigError, match=failpoints.VARIABLE):
        failpoints.parse(text)


def test_kill_happens_at_the_named_hit_and_not_before() -> None:
    ended = run("p=kill@3", "for n in range(5):\n  print(n, flush=True)\n  failpoints.hit('p')")
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == ["0", "1", "2"]


def test_a_point_without_a_number_acts_at_every_hit_and_others_never() -> None:
    code = (
        "for name in ('other', 'p', 'p'):\n  try: failpoints.hit(name); print('ok')\n"
        "  except OSError as e: print(e.errno)"
    )
    assert run("p=errno:EIO", code).stdout.split() == ["ok", str(errno.EIO), str(errno.EIO)]


def test_exit_ends_with_the_documented_code() -> None:
    assert run("p=exit", "failpoints.hit('p')").returncode == ExitCode.FAILPOINT == failpoints.EXIT_CODE


def test_delay_waits() -> None:
    code = "import time; t = time.monotonic(); failpoints.hit('p'); print(time.monotonic() - t)"
    assert 0.2 <= float(run("p=delay:200ms", code).stdout) < 5


def test_stop_stops_until_continued() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from commitmq import failpoints; failpoints.hit('p')"],
        env={**os.environ, failpoints.VARIABLE: "p=stop", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    assert process.wait(30) == 0


def test_a_point_fires_once_over_all_processes_when_asked(tmp_path: Path) -> None:
    once = {failpoints.ONCE_VARIABLE: str(tmp_path)}
    assert run("p=kill@1", "failpoints.hit('p')", **once).returncode == -signal.SIGKILL
    assert run("p=kill@1", "failpoints.hit('p')", **once).returncode == 0


def test_a_spell_has_a_first_and_a_last_hit() -> None:
    code = "for n in range(6):\n  try: failpoints.hit('p'); print('ok')\n  except OSError as e: print(e.errno)"
    emfile = str(errno.EMFILE)
    assert run("p=errno:EMFILE@2-4", code).stdout.split() == ["ok", emfile, emfile, emfile, "ok", "ok"]
    with pytest.raises(ConfigError, match=failpoints.VARIABLE):
        failpoints.parse("p=kill@4-2")


def test_a_spell_is_one_processs_alone(tmp_path: Path) -> None:
    code = "for n in range(3):\n  try: failpoints.hit('p'); print('ok')\n  except OSError as e: print('no')"
    once = {failpoints.ONCE_VARIABLE: str(tmp_path)}
    assert run("p=errno:EIO@2-3", code, **once).stdout.split() == ["ok", "no", "no"]
    assert run("p=errno:EIO@2-3", code, **once).stdout.split() == ["ok", "ok", "ok"]


def test_a_role_has_its_own_points(tmp_path: Path) -> None:
    code = (
        "for role in ('flush', 'writer', 'flush'):\n  failpoints.play(role)\n  try: failpoints.hit('p'); print('ok')\n"
        "  except OSError as e: print('no')"
    )
    once = {failpoints.ONCE_VARIABLE: str(tmp_path)}
    assert run("writer/p=errno:EIO@1", code, **once).stdout.split() == ["ok", "no", "ok"]
    assert [one.name for one in tmp_path.iterdir()] == ["writer%p"]


def test_places_that_are_reached_are_written_down(tmp_path: Path) -> None:
    code = "failpoints.hit('a'); failpoints.play('flush'); failpoints.hit('b'); failpoints.hit('b')"
    assert run("", code, **{failpoints.SEEN_VARIABLE: str(tmp_path)}).returncode == 0
    assert {one.name.partition(".")[0]: one.read_text().split() for one in tmp_path.iterdir()} == {
        "": ["a"],
        "flush": ["b", "b"],
    }
