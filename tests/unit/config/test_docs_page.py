from __future__ import annotations

import runpy
from pathlib import Path

from skyrl_train.config.keys import value_keys

ROOT = Path(__file__).parents[3]
generator = runpy.run_path(str(ROOT / "scripts" / "generate_config_docs.py"))


def test_page_is_what_the_dataclasses_say():
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert page == generator["render"](), "run: python scripts/generate_config_docs.py"


def test_every_key_has_a_row_with_a_meaning():
    page = generator["render"]()
    for key in value_keys():
        section, _, name = key.rpartition(".")
        heading = f"{'## ' if '.' not in section else '### '}{section}\n" if section else "# Configuration\n"
        rows = page[page.index(heading) + len(heading) :].partition("\n## " if not section else "\n#")[0].splitlines()
        (row,) = [row for row in rows if row.startswith(f"| `{name}` |")]
        assert len(row.split(" | ")[-1].strip(" |")) > 5, key
