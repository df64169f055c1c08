from __future__ import annotations

import runpy
from pathlib import Path

from skyrl_train.config.keys import value_keys

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "reference" / "configuration"
generator = runpy.run_path(str(ROOT / "scripts" / "generate_config_docs.py"))


def test_pages_are_what_the_dataclasses_say():
    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert written == generator["render"](), "run: python scripts/generate_config_docs.py"


def test_every_key_has_a_row_with_a_meaning():
    pages = "\n".join(generator["render"]().values())
    for key in value_keys():
        section, _, name = key.rpartition(".")
        heading = f"\n## {section or 'Top-level keys'}\n"
        assert pages.count(heading) == 1
        rows = pages[pages.index(heading) + len(heading) :].partition("\n#")[0].splitlines()
        (row,) = [row for row in rows if row.startswith(f"| `{name}` |")]
        assert len(row.split(" | ")[-1].strip(" |")) > 5, key


def test_first_page_lists_every_key():
    rows = dict(
        line.strip("| ").split(" | ") for line in generator["render"]()["index.md"].splitlines() if line[:3] == "| ["
    )
    keys_by_section = {first[2:].partition("`")[0]: names.split() for first, names in rows.items()}
    listed = {f"{section}.{name.strip('`')}" for section, names in keys_by_section.items() for name in names}
    assert listed == {key for key in value_keys() if "." in key}
