"""Goal: one line an event, whatever is in it, so that a log can be read by line and by key.

Method: a process of its own logs to its standard error, because that is what a node does; lines are parsed back by a
small reader of the documented form, and must give what was logged.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq import log as log_module
from commitmq.log import LimitedLog, configure, get_log

LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>[a-z]+) (?P<process>\S+) (?P<rest>.*)", re.DOTALL
)
FIELD = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^ "=]*)')


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard error of this process while its log is configured; the logging setup is put back afterwards."""
    root = logging.getLogger("commitmq")
    before = (root.handlers[:], root.level, root.propagate)
    text = io.StringIO()
    # Not sys.stderr itself: pytest puts its own there between the set-up and the call of a test.
    monkeypatch.setattr(log_module, "sys", SimpleNamespace(stderr=text))
    configure()
    yield text
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def fields_of(line: str) -> dict[str, str]:
    fields = {}
    for key, value in FIELD.findall(line):
        if value.startswith('"'):
            value = re.sub(r"\\(x..|u.{4}|U.{8}|.)", lambda found: str(ast.literal_eval(f"'{found[0]}'")), value[1:-1])
        fields[key] = value
    return fields


def test_a_line_has_time_level_process_message_and_fields(stream: io.StringIO) -> None:
    get_log("writer").info("segment rolled", base_offset=131072, path="commitlog/00000000000000131072")
    line = stream.getvalue()
    assert line.endswith("\n")
    found = LINE.fullmatch(line[:-1])
    assert found is not None
    assert found["level"] == "info"
    assert found["process"] == "writer"
    assert found["rest"] == "segment rolled base_offset=131072 path=commitlog/00000000000000131072"


def test_time_is_utc_with_milliseconds_of_the_same_second(stream: io.StringIO) -> None:
    record = logging.LogRecord("commitmq.flush", logging.INFO, "", 0, "x", None, None)
    record.created, record.msecs = 1_700_000_000.007, 7.9
    handler = logging.getLogger("commitmq").handlers[0]
    assert handler.format(record).startswith("2023-11-14T22:13:20.007Z info flush x")


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_each_level_has_its_method(stream: io.StringIO, level: str) -> None:
    configure("DEBUG")
    getattr(get_log("reput"), level)("text", key=1)
    assert f" {level} reput text key=1\n" in stream.getvalue()


def test_lines_below_the_level_are_left_out(stream: io.StringIO) -> None:
    configure("WARNING")
    get_log("reput").info("not shown")
    get_log("reput").warning("shown")
    assert stream.getvalue().count("\n") == 1
    assert "not shown" not in stream.getvalue()


def test_configuring_twice_does_not_double_the_lines(stream: io.StringIO) -> None:
    configure()
    get_log("reput").info("once")
    assert stream.getvalue().count("once") == 1


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("two words", '"two words"'),
        ('say "no"', '"say \\"no\\""'),
        ("a=b", '"a=b"'),
        ("C:\\x", '"C:\\\\x"'),
        ("line\nbreak\ttab", '"line\\nbreak\\ttab"'),
        (None, "None"),
        (-7, "-7"),
        ("grün", "grün"),
        ("\x1b[2J\r\0", r'"\x1b[2J\r\x00"'),
        ("a\u2028b\u202ec", r'"a\u2028b\u202ec"'),
        ("\udcff\\", r'"\udcff\\"'),
        ("x" * 5_000, '"' + "x" * 4_096 + '… (5000 characters)"'),
    ],
)
def test_a_value_is_quoted_when_a_reader_would_mistake_it(stream: io.StringIO, value: object, written: str) -> None:
    get_log("x").info("event", key=value)
    assert stream.getvalue().endswith(f" event key={written}\n")


@given(st.dictionaries(st.from_regex(r"[a-z]\w{0,8}", fullmatch=True).filter(str.isascii), st.text(max_size=30)))
def test_fields_can_be_read_back(fields: dict[str, str]) -> None:
    record = logging.LogRecord("commitmq.x", logging.INFO, "", 0, "event", None, None)
    record.fields = fields
    line = log_module._Formatter().format(record)
    assert "\n" not in line
    found = LINE.fullmatch(line)
    assert found is not None
    assert fields_of(found["rest"].removeprefix("event")) == fields


def test_an_exception_is_one_line_with_its_traceback(stream: io.StringIO) -> None:
    try:
        raise ValueError("first line\nsecond line")
    except ValueError as error:
        get_log("reader-0").exception("pull failed", error=repr(error))
    line = stream.getvalue()
    assert line.count("\n") == 1
    traceback = fields_of(line)["traceback"]
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert traceback.endswith("ValueError: first line\nsecond line")
    assert fields_of(line)["error"] == "ValueError('first line\\nsecond line')"


def test_a_process_that_was_not_configured_stays_silent_below_warnings() -> None:
    # The library must not configure logging by itself: an application that embeds a producer decides.
    code = "from commitmq.log import get_log; get_log('producer').info('hidden')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    assert done.stderr == ""


def test_a_configured_process_logs_to_standard_error_only() -> None:
    code = "from commitmq.log import LimitedLog, configure, get_log; configure(); get_log('flush').info('up', pid=1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    assert done.stderr.endswith(" info flush up pid=1\n")


def test_a_programs_own_logging_keeps_the_fields() -> None:
    """Goal: under ``logging.basicConfig`` a line says which group and which error, as in the node's own log."""
    program = (
        "import logging; logging.basicConfig(level='INFO'); from commitmq.log import get_log; "
        "get_log('consumer').warning('a commit was refused', group='g 1', error='FENCED: 100% gone')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stderr == 'WARNING:commitmq.consumer:a commit was refused group="g 1" error="FENCED: 100% gone"\n'


def test_what_strangers_cause_has_few_lines_and_the_rest_is_counted(stream: io.StringIO) -> None:
    now = [0.0]
    log = LimitedLog(get_log("server"), most=3, period_s=10.0, clock=lambda: now[0])
    for number in range(100):
        log.warning("no client", peer=number, error="x" * 10_000)
    log.warning("another thing", peer=1)
    log.error("it failed", code=1)
    log.error("it failed", code=2)
    now[0] = 11.0
    log.warning("no client", peer=100, error="x")
    lines = stream.getvalue().splitlines()
    assert [line.split(" warning ")[-1][:22] for line in lines[:4]] == ["server no client peer=" for _ in range(3)] + [
        "server another thing p"
    ]
    assert len(lines) == 7
    assert max(map(len, lines)) < 700
    assert fields_of(lines[-1])["left_out"] == "97"
    assert fields_of(lines[-1])["peer"] == "100"


def test_a_json_line_is_printable(stream: io.StringIO) -> None:
    configure("INFO", "json")
    value = "\x1b[2J\x9b\u2028\udcff"
    get_log("x").info("event", key=value, long="x" * 5_000)
    line = stream.getvalue()[:-1]
    assert line.isprintable()
    found = json.loads(line)
    assert (found["key"], found["long"]) == (value, "x" * 4_096 + "… (5000 characters)")
