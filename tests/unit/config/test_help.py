from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.config.key_help import format_help
from skyrl_train.config.keys import value_keys
from skyrl_train.config.prepare import run_entrypoint
from skyrl_train.config.sanity_warnings import IGNORED_KEYS


def test_every_key_has_its_line_with_its_choices():
    text = format_help([], 120)
    lines = text.split("\n")
    assert max(map(len, lines)) <= 120
    assert "trainer.algorithm: " in text
    (strategy,) = (line for line in lines if line.startswith("  strategy=") and "fsdp2" in line)
    assert "strategy=fsdp2" in strategy
    assert "[single|fsdp2|fsdp|deepspeed|megatron] Strategy that distributes" in strategy
    shown = [line for line in lines if line.startswith("  ")]
    assert len(shown) == len([key for key in value_keys() if key not in IGNORED_KEYS])


def test_help_describes_sections_and_keys():
    section = format_help(["trainer.guards"], 100)
    assert "trainer.guards.max_ratio=100.0  (" in section
    assert "`mismatch/ratio_max`" in " ".join(section.split())
    assert max(len(line) for line in section.split("\n") if line.startswith("      ")) <= 100
    key = format_help(["generator.tensor_parallel_size"], 100)
    assert "generator.inference_engine_tensor_parallel_size=1" in key
    assert "Other names: generator.tensor_parallel_size" in " ".join(key.split())
    assert "trainer.algorithm.dppo: " in format_help(["trainer.algorithm"], 100)


def test_it_is_printed_without_checking_anything_else(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    def never(_: object) -> None:
        raise AssertionError

    run_entrypoint(never, ["--help", "trainer.epcohs=3"])
    assert "  strategy=fsdp2" in capsys.readouterr().out
    run_entrypoint(never, ["--help", "trainer.guards"])
    assert "trainer.guards.stop=" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        run_entrypoint(never, ["--help", "trainer.guard"])
    assert left.value.code == 2
    assert "Did you mean trainer.guards" in capsys.readouterr().err
