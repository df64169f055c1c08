"""The page of models is generated from the table, and every cell of the table has a test."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.integration.engines import test_conformance_learner

from . import test_conformance_models, test_learner, test_parallel
from .table import ARCHITECTURES, COLUMNS

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "scripts" / "generate_model_docs.py")
generator = runpy.run_path(SCRIPT)


def cases(*modules: Any) -> list[str]:
    """Return the ids of the cases that are cells, of the tests of modules."""
    marks = [
        mark for module in modules for function in vars(module).values() for mark in getattr(function, "pytestmark", ())
    ]
    parametrizations = [mark.args for mark in marks if mark.name == "parametrize"]
    return [
        case.id for names, values in parametrizations if names in (("name", "column"), "started") for case in values
    ]


PAGE = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
STALE = "run: python scripts/generate_model_docs.py"


def tensor_parallel_section() -> str:
    """Return the page's section of models that tensor parallelism rejects."""
    start = PAGE.index(generator["TENSOR_PARALLEL_HEADING"])
    return PAGE[start : PAGE.index("\n## ", start)]


def test_page_is_generated_from_the_table():
    assert generator["render"](tensor_parallel_section()) == PAGE, STALE


@pytest.mark.on_demand
@pytest.mark.slow
def test_page_lists_models_without_tensor_parallelism():
    section = tensor_parallel_section()
    version = re.search(r"transformers (\d+\.\d+)\.", section)
    assert version is not None
    if not transformers.__version__.startswith(f"{version[1]}."):
        pytest.skip(f"the page lists models of transformers {version[1]}")
    program = f"import runpy; print(runpy.run_path({SCRIPT!r})['tensor_parallel_section'](), end='')"
    # In a new process: other tests import and register things that change which types transformers can build.
    generated = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert section == generated.stdout, STALE


def test_every_cell_has_one_test():
    case_ids = cases(test_learner, test_parallel, test_conformance_models, test_conformance_learner)
    assert sorted(case_ids) == sorted(f"{row.name}-{column.name}" for row in ARCHITECTURES for column in COLUMNS)


def test_ci_tests_one_supported_cell_per_column():
    for column in COLUMNS:
        assert column.in_ci in {row.name for row in ARCHITECTURES} - column.refused.keys()
