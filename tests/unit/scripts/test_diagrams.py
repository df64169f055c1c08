"""The diagrams in docs/images are those that scripts/diagrams.py draws, and a page shows each of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]
PICTURES: dict[str, str] = runpy.run_path(str(ROOT / "scripts" / "diagrams.py"))["draw_all"]()


def test_committed_diagrams_match_script():
    drawn = {name: (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") for name in PICTURES}
    assert drawn == PICTURES, "run: python scripts/diagrams.py"
    assert {path.name for path in (ROOT / "docs" / "images").glob("*.svg")} == set(PICTURES)


def test_diagrams_are_valid_and_self_contained():
    for picture in PICTURES.values():
        assert ElementTree.fromstring(picture).tag.endswith("svg")
        assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")


def test_every_diagram_is_shown_on_a_page():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert [name for name in PICTURES if f"images/{name})" not in pages] == []
