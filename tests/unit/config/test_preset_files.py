"""Hostile YAML: an error by name, in no time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from skyrl_train.config.prepare import prepare
from skyrl_train.errors import ConfigError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
CHAIN = "a0: &a0 [[[[[[[[[[x]]]]]]]]]]\n" + "".join(f"a{n}: &a{n} [[[[[[[[[[*a{n - 1}]]]]]]]]]]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (BOMB.encode(), "has more than 100000 values once its aliases are expanded"),
        (b"trainer: &t\n  epochs: 2\n  again: *t\n", "line 1: refers to itself through an alias"),
        (b"\x80\x04\x95\xff", "byte 0 is not UTF-8"),
        (b"a: \x00\x01", "cannot be read"),
        (b"{" * 1_000_000, "is more than 50 levels deep|maximum nesting depth"),  # newer libyamls see it first
        (b"a: {" * 100, "cannot be read"),
        (b"a: " + b"[" * 300 + b"]" * 300, "is more than 50 levels deep"),
        (CHAIN.encode(), "is more than 50 levels deep"),
        (b"a: [1, 2", "cannot be read"),
        (b"#" * 2_000_000, "has more than 1048576 bytes"),
    ],
    ids=["bomb", "circle", "pickle", "control", "very deep", "open", "deep", "chain", "torn", "large"],
)
@pytest.mark.parametrize(
    "entry", ["", "bad", "/bad", "bad.yaml", "bad@trainer", "optional g: bad", "g: [bad]", "/g: bad"]
)
def test_a_hostile_file_is_named(content: bytes, says: str, entry: str, tmp_path: Path):
    (tmp_path / "g").mkdir()
    for file in ("bad.yaml", "g/bad.yaml") if entry else ("own.yaml",):
        (tmp_path / file).write_bytes(content)
    if entry:
        item = f"{{{entry}}}" if ":" in entry else entry
        (tmp_path / "own.yaml").write_text(f"defaults: [ppo_base_config, {item}, _self_]\n")
    started = time.monotonic()
    with pytest.raises(ConfigError, match=says):
        prepare(["--config-dir", str(tmp_path), "--config-name", "own"], has_accelerator=False)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "value", ["!!int abc", "!!float abc", "!!bool abc", "!!timestamp abc", "7" * 5_000], ids=lambda value: value[:16]
)
def test_a_value_that_cannot_be_read_is_an_error_by_name(value: str, tmp_path: Path):
    (tmp_path / "own.yaml").write_text(f"trainer:\n  seed: {value}\n")
    with pytest.raises(ConfigError, match=r"own\.yaml: has a value that cannot be read|trainer\.seed"):
        prepare(["--config-dir", str(tmp_path), "--config-name", "own"], has_accelerator=False)


def test_a_name_that_no_file_can_have_is_an_error(tmp_path: Path):
    (tmp_path / "own.yaml").write_text(f"defaults: [{'a' * 300}]\n")
    with pytest.raises(ConfigError, match="cannot be composed"):
        prepare(["--config-dir", str(tmp_path), "--config-name", "own"], has_accelerator=False)


def test_presets_that_include_each_other_are_refused(tmp_path: Path):
    (tmp_path / "one.yaml").write_text("defaults: [two]\n")
    (tmp_path / "two.yaml").write_text("defaults: [one]\n")
    with pytest.raises(ConfigError, match="one cannot be composed: presets include each other"):
        prepare(["--config-dir", str(tmp_path), "--config-name", "one"], has_accelerator=False)
