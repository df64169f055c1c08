"""Every defect of the two pages about them has a test that carries its id, or stands in the one's short list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.marks import all_claims, claims

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "tensordict_defects.md").read_text()
ALL_SOURCES = "".join(file.read_text() for file in TESTS.rglob("test_*.py"))
OURS = (TESTS.parent / "docs" / "defects.md").read_text()
IDS = [f"D{number:02}" for number in range(1, 42)]
HELD, _, NOT_OFFERED = PAGE.partition("\n## Of parts that are not offered")
MOST_WITHOUT_A_TEST = 5


def rows(part: str) -> dict[str, str]:
    """The rest of a row by the id that it begins with."""
    return dict(re.findall(r"^\| (D\d\d) \| (.+) \|$", part, re.MULTILINE))


def our_rows() -> list[str]:
    return [id for id in re.findall(r"^\| ([\w-]+) \| .+ \|$", OURS, re.MULTILINE) if id not in ("id", "---")]


def test_a_test_that_may_be_skipped_holds_nothing():
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
    assert list(claims(source, "defect")) == [("D02", "test_kept")]
    for whole in ("pytest.importorskip('mcp')\n", "mcp = pytest.importorskip('mcp')\n"):
        assert list(claims(whole + source, "defect")) == []


def test_the_page_names_every_defect_once():
    ids = re.findall(r"^\| (D\d\d) \|", PAGE, re.MULTILINE)
    assert sorted(ids) == IDS


@pytest.mark.parametrize("id", sorted(rows(HELD)))
def test_a_defect_of_the_table_has_a_test(id: str):
    held = all_claims(TESTS, "defect").get(id)
    assert held, f'no unskipped test carries @pytest.mark.defect("{id}"): {rows(HELD)[id]}'


@pytest.mark.parametrize("id", our_rows())
def test_a_defect_of_ours_has_a_test(id: str):
    """Also one that needs a browser or a sandbox, for a defect of these."""
    assert f'defect("{id}")' in ALL_SOURCES, f'no test carries @pytest.mark.defect("{id}")'


def test_few_are_about_parts_that_are_not_offered_and_those_have_a_reason():
    assert len(rows(NOT_OFFERED)) <= MOST_WITHOUT_A_TEST
    assert all(len(reason) > 20 for reason in rows(NOT_OFFERED).values())


def test_ids_are_those_of_the_pages():
    assert sorted(set(our_rows())) == sorted(our_rows())
    assert [id for id in all_claims(TESTS, "defect") if id not in rows(PAGE) and id not in our_rows()] == []
