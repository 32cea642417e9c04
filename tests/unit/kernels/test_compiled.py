"""Goal: the compiled module is what its sources and its types say, takes only the arrays that it can trust, and a missing one
is told in a sentence.

Method: the real module; stubs and sources as text; wrong arrays; a process in which the module cannot be found.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commitmq.format import constants
from commitmq.kernels import codes, compiled

KERNELS = Path(codes.__file__).parent


def _hook() -> Any:
    """The project's build hook, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("hatch_build", Path(__file__).parents[3] / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hatch_build = _hook()


def test_the_types_are_those_of_the_functions() -> None:
    tree = ast.parse((KERNELS / "compiled.pyi").read_text(encoding="utf-8"))
    typed = {one.name: [arg.arg for arg in one.args.args] for one in tree.body if isinstance(one, ast.FunctionDef)}
    real = {
        name: list(inspect.signature(value).parameters)
        for name, value in vars(compiled).items()
        if type(value).__name__ in ("builtin_function_or_method", "cython_function_or_method")
        and not name.startswith("_")
    }
    assert typed == real


def test_the_numbers_are_those_of_the_python_modules() -> None:
    lines = hatch_build.constants(hatch_build.PROJECT).splitlines()[1:]
    given = dict(line.strip().split(" = ") for line in lines)
    for name, value in given.items():
        if name.startswith("SYS_FLAG_") and hasattr(constants.SysFlag, name[9:]):
            assert int(value) == getattr(constants.SysFlag, name[9:])
        else:
            assert int(value) == getattr(constants, name, getattr(codes, name, None))
    assert {"MAGIC_V1", "MIN_RECORD_BYTES", "OK", "STATE_ROW", "SYS_FLAG_STORE_HOST_V6"} <= given.keys()


def test_a_row_has_the_compiler_s_layout() -> None:
    text = (KERNELS / "arrays.pxi").read_text(encoding="utf-8")
    fields = [line.split() for line in text.partition("cdef struct Row:\n")[2].partition("\n\n")[0].splitlines()]
    assert codes.ROW.names is not None
    assert [(name, f"{codes.ROW[name]}_t") for name in codes.ROW.names] == [(name, kind) for kind, name in fields]


@pytest.mark.parametrize(
    "buf",
    [
        b"bytes",
        None,
        np.zeros(8, np.int8),
        np.zeros(16, np.uint8)[::2],
        np.zeros((4, 4), np.uint8),
        np.zeros(8, np.int64),
    ],
    ids=["bytes", "none", "another type", "gaps", "two dimensions", "wider"],
)
def test_an_array_that_cannot_be_trusted_is_refused(buf: Any) -> None:
    with pytest.raises(TypeError, match=r"a kernel (takes|needs)"):
        compiled.crc32(buf, 0, 4, 0)


def test_an_array_that_must_not_be_written_is_refused() -> None:
    out = np.zeros(8, np.uint8)
    compiled.word_stores(out, 0, 1, 8)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="a kernel needs"):
        compiled.word_stores(out, 0, 2, 8)
    assert out.tolist() == [0, 0, 0, 0, 0, 0, 0, 1]


def test_a_subclass_and_an_equal_type_are_taken(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"12345678")
    expected = compiled.crc32(np.frombuffer(b"12345678", np.uint8), 0, 8, 0)
    assert compiled.crc32(np.memmap(tmp_path / "bytes", np.uint8, "r"), 0, 8, 0) == expected
    same = np.dtype([(name, codes.ROW[name]) for name in codes.ROW.names or ()], align=True)
    rows, out = np.zeros(1, same), np.zeros(4, np.int64)
    topics, table = np.zeros((1, 2), np.int64), np.full(4, -1, np.int32)
    assert compiled.walk(np.zeros(8, np.uint8), 0, 0, 0, rows, topics, table, out) == codes.WALK_LIMIT


def test_a_missing_module_is_told_in_a_sentence() -> None:
    program = f"""
import importlib.machinery, sys
found = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = (
    lambda name, *more: None if name == "commitmq.kernels.compiled" else found(name, *more)
)
sys.path[:] = {sys.path!r}
try:
    import commitmq.kernels.compiled
except ImportError as error:
    print(type(error).__name__, error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.startswith("MissingExtraError this installation of commitmq has no compiled kernels: "), ended
    assert len(ended.stdout.splitlines()) == 1


def test_a_compiler_is_asked_for_only_where_none_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [one.split(">")[0] for one in hatch_build.requirements()] == ["Cython", "ziglang"]
    (tmp_path / "cc").touch(0o755)
    assert [one.split(">")[0] for one in hatch_build.requirements()] == ["Cython"]


def test_the_hash_of_what_is_no_utf8_stays_what_index_files_have() -> None:
    """Four bytes for a character below 0x10000: the surrogates are computed in more than 32 bits, and then cut."""
    point = -0x10000
    expected = ((0xD800 + (point >> 10)) * 31 + 0xDC00 + (point & 0x3FF)) & 0xFFFFFFFF
    found = compiled.hash_on(np.frombuffer(b"\xf0\x80\x80\x80", np.uint8), 0, 4, 0)
    assert found == expected
