"""Goal: a client without the extra ``node`` computes the same checksums as a node.

Method: the module is loaded once more where isal cannot be imported, and compared with isal's and with the kernels' own.
"""

from __future__ import annotations

import importlib.util
import sys
import zlib
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from commitmq.format import record
from commitmq.kernels import compiled


@pytest.fixture(scope="module")
def plain() -> ModuleType:
    """:mod:`commitmq.format.record` as it is without isal."""
    spec = importlib.util.find_spec("commitmq.format.record")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "isal", None)
        patch.setitem(sys.modules, "isal.isal_zlib", None)
        spec.loader.exec_module(module)
    return module


def test_which_one_is_used(plain: ModuleType) -> None:
    assert record.crc32 is isal_zlib.crc32
    assert plain.crc32 is zlib.crc32


@given(st.binary(max_size=5000), st.integers(0, 40))
def test_all_of_them_agree(plain: ModuleType, data: bytes, start: int) -> None:
    part = data[start:]
    view = memoryview(data)[start:]
    expected = int(compiled.crc32(np.frombuffer(b"\0" + part, np.uint8), 1, len(part), 0))
    tables = int(compiled.crc32_tables(np.frombuffer(b"\0" + part, np.uint8), 1, len(part), 0))
    for one in (part, bytearray(part), view):
        assert plain.crc32(one) == record.crc32(one) == expected == tables
        assert plain.body_crc(one) == record.body_crc(one) == expected & 0x7FFFFFFF


def test_what_is_long(plain: ModuleType) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8).tobytes()
    assert plain.crc32(data) == record.crc32(data)
    assert plain.crc32(b"") == record.crc32(b"") == 0
