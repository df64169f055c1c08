"""Every preset of examples/ is a good configuration that says nothing without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.config.prepare import prepare

EXAMPLES = Path(__file__).parents[3] / "examples"
PRESETS = sorted(EXAMPLES.rglob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=[str(path.relative_to(EXAMPLES)) for path in PRESETS])
def test_preset_is_good_and_every_key_of_it_has_an_effect(path: Path):
    prepared = prepare(
        ["--config-dir", str(path.parent), "--config-name", path.stem, "trainer.policy.model.path=model"],
        has_accelerator=True,
    )
    assert prepared.warnings == []
    assert len(path.read_text().splitlines()) <= 30
