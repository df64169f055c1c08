"""Modules come in without garbage collection."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest

from skyrl_train.imports import import_modules

GARBAGE = """
import gc
enabled, before = gc.isenabled(), gc.get_stats()
kept = [[] for _ in range(100_000)]
after = gc.get_stats()
"""


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_meanwhile_and_what_came_is_exempt(
    collects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_garbage.py").write_text(GARBAGE)
    (gc.enable if collects else gc.disable)()
    try:
        frozen = gc.get_freeze_count()
        import_modules(["imported_garbage"])
        module = sys.modules.pop("imported_garbage")
        assert gc.isenabled() == collects
        assert not module.enabled
        assert module.before == module.after
        assert gc.get_freeze_count() >= frozen + 100_000
    finally:
        gc.enable()


def test_garbage_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Node:
        """Of a cycle."""

    def garbage() -> weakref.ref[Node]:
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        return weakref.ref(node)

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_once.py").touch()
    before = garbage()
    import_modules(["imported_once"])
    assert before() is None
    later = garbage()
    import_modules(["imported_once"])
    sys.modules.pop("imported_once")
    gc.collect()
    assert later() is None


def test_a_module_that_fails_leaves_the_collector_on():
    with pytest.raises(ModuleNotFoundError):
        import_modules(["a_module_that_nobody_has"])
    assert gc.isenabled()
