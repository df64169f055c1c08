from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("generate_scale_docs", ROOT / "scripts" / "generate_scale_docs.py")
assert spec is not None and spec.loader is not None
generator = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = generator  # where dataclasses look for their annotations
spec.loader.exec_module(generator)


def test_the_page_has_the_tables_of_the_script():
    page = (ROOT / "docs" / "scale.md").read_text()
    assert page == generator.render(page), "run: python scripts/generate_scale_docs.py"


def test_measured_figures_are_in_the_benchmarks():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    lines = [
        "| | the same through the update | 179.9 | 17.3 | ≤ 20 |",
        "| rollouts to ranks, with both scores | 9.1 | 20.1 |",
        "| 131,072 sequences, 4,096 ranks | 80.5 | 7.7 |",
        "| 16,384 conversations, 64 tokens a turn | turns a CPU-second of the driver | 1,877 | 3,961 | ≥ 4,000 |",
        "| 16,384 conversations, 1,000 tokens a turn | turns a CPU-second of the driver | 928 | 2,237 | ≥ 2,500 |",
        "0.149 s (20.7 GB/s)",
        "| 8 `training` | TFLOP/s, MFU | 229.8; 23.2 % | |",
    ]
    assert [line for line in lines if line not in page] == []


def test_unit_costs_are_those_of_the_benchmarks():
    turns = [1 / (generator.TURN_S + tokens * generator.TURN_TOKEN_S) for tokens in (64, 1000)]
    assert turns == pytest.approx([3961, 2237], rel=0.01)
    assert (generator.HELD_BYTES, generator.RANKED) == (17.3, 20.1e6)
    assert pytest.approx(7.7, rel=0.01) == generator.PART_S * 131_072
    assert (generator.IN_BYTES, generator.OUT_BYTES) == (3 * 4 + 2 * 4, 4 + 1 + 3 * 4)
    assert (generator.MFU, generator.SYNC_GB_S) == (0.232, 20.7)


def test_a_step_by_hand():
    model = generator.Model("1B", 1e9, 1e9, 10, 1000, tokens_s=1000, replica=1)
    given = generator.Assumptions(prompts=2, samples=4, length=1000, tflops=100, mfu=0.5, sequence_tokens_s=1e9)
    step = generator.Step(model, 8, given)
    assert step.tokens == 8000
    assert step.generate == 1.0  # 8,000 tokens at 8 x 1,000
    assert step._compute(3) == pytest.approx((6e9 + 6 * 10 * 1000 * 1000) * 8000 / (8 * 50e12))
    assert step.state_gb == 2.0
    assert step.network == 0.0, "on one node nothing passes the driver's network"
    assert step.seconds == pytest.approx(step.generate + step.batch + step.score + step.update + step.sync)


def test_other_assumptions_are_other_tables():
    assert list(generator.tables(generator.Assumptions(mfu=0.4))) != list(generator.tables(generator.Assumptions()))
