"""Every defect in the table of defects.md has a test that carries its ID."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.marker_scan import all_marked_tests, marked_tests

TESTS = Path(__file__).resolve().parents[1]
IDS = re.findall(r"^\| (?!id \|)(\w[\w-]*) \| .+ \|$", Path(__file__).with_name("defects.md").read_text(), re.MULTILINE)
OF_TORCHRL = [f"D{number:02}" for number in range(1, 42)]


def test_skipped_tests_do_not_count():
    source = """
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="x")
always = pytest.mark.parametrize("x", [1])
@needs_bubblewrap
@pytest.mark.defect("D01")
def test_alias(): ...
@always
@pytest.mark.defect("D02")
def test_kept(x): ...
@pytest.mark.defect("D03")
def test_body():
    pytest.importorskip("mcp")
@pytest.mark.defect("D04")
async def test_inside():
    if windows():
        pytest.skip("x")
"""
    assert list(marked_tests(source, "defect")) == [("D02", "test_kept")]
    for whole in ("pytest.importorskip('mcp')\n", "mcp = pytest.importorskip('mcp')\n"):
        assert list(marked_tests(whole + source, "defect")) == []


def test_table_names_every_defect_once():
    assert len(IDS) == len(set(IDS))
    assert sorted(id for id in IDS if re.fullmatch(r"D\d\d", id)) == OF_TORCHRL


def test_every_torchrl_defect_has_unskipped_test():
    missing = sorted(set(OF_TORCHRL) - all_marked_tests(TESTS, "defect").keys())
    assert not missing, f"no test that always runs carries @pytest.mark.defect(id) for {', '.join(missing)}"


def test_every_defect_has_test():
    """Tests of other defects may be skipped if a browser or a sandbox is missing."""
    sources = "".join(file.read_text() for file in TESTS.rglob("test_*.py"))
    missing = [id for id in IDS if f'defect("{id}")' not in sources]
    assert not missing, f"no test carries @pytest.mark.defect(id) for {', '.join(missing)}"


def test_every_marked_defect_is_in_table():
    unknown = sorted(all_marked_tests(TESTS, "defect").keys() - set(IDS))
    assert not unknown, f"defects.md has no row for {', '.join(unknown)}"
