"""Goal: no bytes from the other side make the header functions raise anything but ProtocolError.

Method: hypothesis draws frames of random bytes and of random JSON.
"""

from __future__ import annotations

import orjson
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commitmq import FencedError, Outcome, ProtocolError
from commitmq.protocol import wire

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["v", "op", "id", "x"]), inner),
    max_leaves=8,
)


def test_a_request_reads_back() -> None:
    assert wire.parse_request(wire.pack({"op": "hello", "id": 3})) == {"v": 1, "op": "hello", "id": 3}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60) | JSON.map(orjson.dumps))
def test_any_frame_is_a_request_or_a_protocol_error(frame: bytes) -> None:
    code = "none"
    try:
        assert wire.parse_request(frame)["v"] == 1
    except ProtocolError as error:
        code = error.code
    assert code in ("none", "BAD_HEADER", "UNSUPPORTED_VERSION")
    assert wire.request_id(frame) is None or type(wire.request_id(frame)) is int


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60) | JSON.map(orjson.dumps) | st.dictionaries(st.just("ok"), JSON).map(orjson.dumps))
def test_any_frame_is_an_answer_or_a_protocol_error(frame: bytes) -> None:
    try:
        assert type(wire.parse_answer(frame)["ok"]) is bool
    except ProtocolError as error:
        assert "does not speak this protocol" in str(error)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "BAD_HEADER"),
        (b"[1]", "BAD_HEADER"),
        (b"{}", "BAD_HEADER"),
        (b'{"v":"1","op":"x","id":1}', "BAD_HEADER"),
        (b'{"v":2,"op":"x","id":1}', "UNSUPPORTED_VERSION"),
        (b'{"v":1,"id":1}', "BAD_HEADER"),
        (b'{"v":1,"op":"x","id":"1"}', "BAD_HEADER"),
        (b'{"v":1,"op":"x","id":true}', "BAD_HEADER"),
        (b" " * (wire.MAX_HEADER_BYTES + 1), "BAD_HEADER"),
    ],
)
def test_bad_requests(frame: bytes, code: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.parse_request(frame)
    assert caught.value.code == code


def test_refusals_become_their_errors() -> None:
    answer = wire.parse_answer(wire.error(1, "FENCED", "why"))
    assert isinstance(wire.refusal(answer), FencedError)
    answer = wire.parse_answer(wire.error(1, "SYSTEM_BUSY", "why", retry_after_ms=50, outcome="not_stored"))
    error = wire.send_refusal(answer)
    assert (error.code, error.outcome, error.retry_after_ms) == ("SYSTEM_BUSY", Outcome.NOT_STORED, 50)
    assert wire.send_refusal({"ok": False, "outcome": "new word"}).outcome is Outcome.UNKNOWN


def test_the_name_of_no_operation_is_shown_shortened() -> None:
    header = wire.parse_request(wire.pack({"op": "x" * 800_000, "id": 3}))
    assert header == {"v": 1, "op": "x" * 64 + "…", "id": 3}


@pytest.mark.parametrize(
    ("header", "names_none"),
    [
        (wire.pack({"op": "x" * 800_000, "id": 3}), True),
        (wire.pack({"op": "x" * 257, "id": 3}), True),
        (b' { "id" : -3 , "more":"y" , "op" : "' + b"x" * 300, True),
        (wire.pack({"op": "x" * 256, "id": 3}), False),  # perhaps 64 characters of four bytes each
        (wire.pack({"op": "\N{GRINNING FACE}" * 64, "id": 3}), False),
        (wire.pack({"op": "group.join", "id": 3, "topics": ["x" * 300] * 1_000}), False),
        (wire.pack({"id": 3, "more": '"op":"' + "x" * 300, "op": "pull"}), False),
        (wire.pack({"id": 3, "more": {"op": "x" * 300}, "op": "pull"}), False),
        (b"", False),
        (b"x" * 60_000, False),
    ],
)
def test_a_header_that_names_no_operation(header: bytes, names_none: bool) -> None:
    assert wire.names_no_operation(header) is names_none
    assert wire.names_no_operation(zmq.Frame(header)) is names_none


def test_an_answer_again_has_another_id() -> None:
    answer = wire.ok(-7, id_of="x", many=[1, 2])
    assert wire.answer_again(answer, -7, 12_345) == wire.ok(12_345, id_of="x", many=[1, 2])
