"""The table of third-party names matches the code, and its check detects missing names."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from functools import partial

import pytest

from tests.cuda_wheels import names, touched
from tests.cuda_wheels.touched import Missing

TABLES = {name: getattr(names, name) for name in ("VLLM", "SGLANG", "TORCH", "TRANSFORMERS", "CUDA")}
WITH_PRIVATE_NAMES = ("engines/", "models/", "strategies/", "weight_sync/", "report/")
ELSEWHERE = {"strategies/deepspeed.py"}
"""The private names are DeepSpeed's, which has one build for all devices."""


BEHIND_AN_ATTRIBUTE = {"forward_native", "forward_cuda"}
"""Methods that run when the code calls their object, so that the code does not contain their names."""


def words(row: ast.expr) -> Iterator[str]:
    """Yield the names in a row that its file must contain.

    The name of a called class is not one of them, because it may have another name there, or a library may call it.
    """
    if isinstance(row, ast.Compare):
        assert isinstance(row.left, ast.Constant)
        yield str(row.left.value)
        return
    called = row.func if isinstance(row, ast.Call) else row
    assert isinstance(called, ast.Attribute)
    if isinstance(row, ast.Call):
        yield from (keyword.arg for keyword in row.keywords if keyword.arg is not None)
    if not (isinstance(row, ast.Call) and called.attr[0].isupper()) and called.attr not in BEHIND_AN_ATTRIBUTE:
        yield called.attr


def test_every_row_names_what_its_file_uses():
    stale = []
    for table in TABLES.values():
        for file, row in touched.rows(table):
            source = (touched.PACKAGE / file).read_text()
            absent = [word for word in words(row) if not re.search(rf"(?<![a-z]){re.escape(word)}", source)]
            stale += [f"{file} no longer uses {absent}: {ast.unparse(row)}"] if absent else []
    assert not stale, "\n".join(stale)


OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields"}
"""Names that are documented in spite of their underscore."""


def own_names() -> set[str]:
    """Return the names that the code defines or assigns itself."""
    found = set()
    for path in touched.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def test_private_third_party_names_are_listed():
    ours = own_names()
    known = {word for table in TABLES.values() for _, row in touched.rows(table) for word in words(row)}
    for path in sorted(touched.PACKAGE.rglob("*.py")):
        file = path.relative_to(touched.PACKAGE).as_posix()
        if not file.startswith(WITH_PRIVATE_NAMES) or file in ELSEWHERE:
            continue
        private = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        private = {name for name in private - ours - known - OF_NAMED_TUPLES if re.match("_[^_]", name)}
        assert not private, f"{file} uses the private names {sorted(private)}: add rows to tests/cuda_wheels/names.py"


def row(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    "good",
    [
        "asyncio.Queue.put_nowait(self, item)",
        "asyncio.Queue._maxsize",
        "json.dumps(_, indent=_)",
        "json.decoder.JSONDecoder.decode(..., _w=_)",
        "'OK' in http.HTTPStatus.__members__",
        "torch.distributed.TCPStore(host_name, port, is_master=_)",
    ],
)
def test_what_is_there_passes(good: str):
    touched.check(row(good))


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("no_such_package.name", "no module no_such_package"),
        ("asyncio.no_such_module.name", "asyncio has no no_such_module"),
        ("asyncio.Queue.put_later", "asyncio.Queue has no put_later"),
        ("asyncio.Queue.put_nowait(self, thing)", "thing is item"),
        ("asyncio.Queue.put_nowait(self, item, later=_)", "unexpected keyword argument 'later'"),
        ("asyncio.Queue.put_nowait(self)", "missing a required argument: 'item'"),
        ("'TEAPOT' in http.HTTPStatus.__members__", "no such entry"),
        ("torch.distributed.TCPStore(host_name, port, is_slave=_)", "unexpected keyword argument 'is_slave'"),
    ],
)
def test_what_is_not_there_is_missed(bad: str, problem: str):
    with pytest.raises(Missing, match=re.escape(problem)):
        touched.check(row(bad))


class _Renamed(asyncio.Queue):  # type: ignore[type-arg]
    def put_nowait(self, thing: object) -> None: ...

    def get_nowait(self) -> None: ...


def test_override_accepts_all_calls_of_original():
    found = {
        name: partial(touched.check_override, ours, theirs)
        for name, ours, theirs in touched.overridden(_Renamed, "asyncio")
    }
    assert found.keys() == {"put_nowait", "get_nowait"}
    found["get_nowait"]()
    found["put_nowait"](by_name=False)
    with pytest.raises(Missing, match="'thing'"):
        found["put_nowait"]()


def test_imports_are_read_from_the_source():
    found = {(file, ast.unparse(name)) for file, name in touched.imported("vllm")}
    assert ("engines/vllm/sampler.py", "vllm.v1.sample.sampler.Sampler") in found
    assert not [name for _, name in found if not name.startswith("vllm")]
