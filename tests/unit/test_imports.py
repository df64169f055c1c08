"""Imports run without garbage collection."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from skyrl_train.imports import import_without_gc

GARBAGE = """
import gc
enabled, before = gc.isenabled(), gc.get_stats()
kept = [[] for _ in range(100_000)]
after = gc.get_stats()
"""


@pytest.mark.parametrize("collects", [True, False])
def test_imports_run_without_garbage_collection(collects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_garbage.py").write_text(GARBAGE)
    (gc.enable if collects else gc.disable)()
    try:
        import_without_gc(["imported_garbage"])
        module = sys.modules.pop("imported_garbage")
        assert gc.isenabled() == collects
        assert not module.enabled
        assert module.before == module.after
    finally:
        gc.enable()


def test_failed_import_reenables_garbage_collection():
    with pytest.raises(ModuleNotFoundError):
        import_without_gc(["a_module_that_nobody_has"])
    assert gc.isenabled()
