from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from skyrl_train.report.metric_catalog import DEPRECATED_NAMES, METRICS, metric_of

ROOT = Path(__file__).parents[3]
LITERAL = re.compile(r'"((?:[a-z_]+)/[a-z_/]+)"')
FAMILIES = {metric.name.partition("/")[0] for metric in METRICS}
generator = runpy.run_path(str(ROOT / "scripts" / "generate_metric_docs.py"))


def test_docs_page_has_current_tables():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert page == generator["render"](page), "run: python scripts/generate_metric_docs.py"


def test_main_curves_are_catalog_metrics():
    source = (ROOT / "viewer" / "src" / "curves.ts").read_text(encoding="utf-8")
    main, parts = (
        re.findall(r'"(.+?)"', text)
        for name in ("MAIN", "STEP_PARTS")
        for text in re.findall(rf"const {name} = \[(.*?)\];", source, re.DOTALL)
    )
    assert len(main) > 10 and len(parts) > 3
    names = {*(name.replace("*", "{source}") for name in main), *(f"timing/{part}_s" for part in parts)}
    assert names | {"timing/step_s"} <= {metric.name for metric in METRICS}, "by themselves, not as one of a family"


def test_no_metric_is_named_twice():
    names = [metric.name for metric in METRICS]
    assert sorted(set(names)) == sorted(names)


def test_deprecated_names_lead_to_metrics_of_the_catalog():
    run_metrics = {old: new for old, new in DEPRECATED_NAMES.items() if "/" in new}
    names = {metric.name for metric in METRICS}
    assert not run_metrics.keys() & names
    assert {new for new in run_metrics.values() if not new.startswith("critic/")} <= names


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("reward/pass_at_8", "reward/pass_at_{n}"),
        ("eval/openai/gsm8k/avg_score", "eval/{source}/avg_score"),
        ("rollouts/failed", "rollouts/failed"),
        ("rollouts/failed/timeout", "rollouts/failed/{kind}"),
        ("environment/no_answer", "environment/{name}"),
        ("policy/loss", "policy/loss"),
    ],
)
def test_metric_is_found_by_name(name: str, found: str):
    metric = metric_of(name)
    assert metric is not None
    assert metric.name == found


def test_every_metric_in_code_is_in_catalog():
    """The code outside `report` and `tensordict` names no metric that the catalog lacks."""
    named = {
        name
        for file in (ROOT / "skyrl_train").rglob("*.py")
        if not {"report", "tensordict"} & set(file.relative_to(ROOT).parts)
        for name in LITERAL.findall(file.read_text(encoding="utf-8"))
        if name.partition("/")[0] in FAMILIES
    }
    assert len(named) > 60
    assert sorted(name for name in named if metric_of(name) is None and name not in INTERNAL) == []


INTERNAL = {"engines/idle", "engines/wasted_tokens"}
"""Metrics of the engine client that a run reports as async/*."""
