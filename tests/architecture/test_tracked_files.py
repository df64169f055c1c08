"""Files that must never be committed: weights, big files, names of package registries, paths of one machine."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".npy", ".pkl", ".whl"}
MAX_BYTES = 1_000_000

# Assembled here, so that this file does not hold them.
HOSTS = [
    "pypi" + ".org",
    "python" + "hosted.org",
    "registry." + "npmjs",
    "download." + "pytorch.org",
    "crates" + ".io",
    "test." + "pypi",
]
MACHINE_PATHS = re.compile(r"(?<![\w.$}/~-])/(?:" + "|".join(["wor" + "k", "op" + "t", "roo" + "t"]) + r")/\w")
TRACKER_REFERENCE = re.compile(r"(?i)\b" + "issue" + r"s?\s+#?\d+")


@cache
def tracked() -> tuple[Path, ...]:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip("not a git clone")
    return tuple(path for name in result.stdout.split("\0") if name and (path := REPOSITORY / name).is_file())


def texts() -> list[tuple[str, str]]:
    found = []
    for path in tracked():
        try:
            found.append((path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def test_no_weights_and_nothing_big():
    assert [path.name for path in tracked() if path.suffix in WEIGHTS or path.stat().st_size > MAX_BYTES] == []


def test_no_host_of_a_package_registry_is_named():
    assert [(name, host) for name, text in texts() for host in HOSTS if host in text] == []


def test_no_path_of_one_machine_is_named():
    found = [(name, match.group()) for name, text in texts() for match in MACHINE_PATHS.finditer(text)]
    assert found == []


def test_texts_do_not_reference_internal_tracker():
    assert [(name, m.group()) for name, text in texts() for m in TRACKER_REFERENCE.finditer(text)] == []


def test_the_top_level_is_what_the_readme_draws():
    assert {path.relative_to(REPOSITORY).parts[0] for path in tracked() if path.parent != REPOSITORY} <= {
        ".ci",
        "config",
        "docs",
        "examples",
        "integrations",
        "scripts",
        "skyrl_train",
        "tests",
        "viewer",
    }
