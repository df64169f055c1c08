"""examples/quickstart.ipynb runs in a kernel at toy size. test_quickstart.py runs the same code at full size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

NOTEBOOK = Path(__file__).parents[3] / "examples" / "quickstart.ipynb"


def executed(folder: Path, **parameters: object) -> Any:
    """Return the notebook after a run with other parameters, which are the assignments of its first code cell."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    cell.source += f"\nRUN = Path({str(folder)!r})"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    return notebook


def test_notebook_is_committed_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
    assert {cell["execution_count"] for cell in cells} == {None}


def test_notebook_configuration_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(NOTEBOOK.parent)
    (cell,) = (cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if "sk.load_config(" in cell.source)
    names: dict[str, Any] = {"RUN": tmp_path, "STEPS": 1, "model": tmp_path / "model"}
    exec(cell.partition("result = ")[0], names)
    assert names["config"].trainer.max_steps == 1


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("warm_up_steps", [0, 4])
def test_notebook_runs_to_last_cell(warm_up_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The warm-up is a separate process with its own Ray and takes 20 s.

    test_quickstart.py covers it for every change.
    """
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    notebook = executed(tmp_path / "run", WARM_UP_STEPS=warm_up_steps, STEPS=1)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in shown)
    assert "greedy accuracy on held-out problems: " in text and " in 1 steps" in text
    assert any("image/png" in output.get("data", ()) for output in shown)
    assert read_jsonl(tmp_path / "run" / "grpo" / METRICS_FILE)[-1]["step"] == 1
