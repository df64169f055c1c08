"""Write the ten tasks of tasks.py as train.parquet and validation.parquet in SkyRL's row format.

python -m examples.mini_swe_agent.mini_swe_dataset --output ~/data/mini_swe
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from examples.mini_swe_agent.tasks import TASKS, Task
from skyrl_train.data.conversion import write_split


def row(task: Task) -> dict[str, Any]:
    """Return a task as a row, with mappings as JSON because the rows of a table share their columns."""
    return {
        "data_source": "mini_swe",
        "prompt": [{"role": "user", "content": task.problem}],
        "env_class": "mini_swe",
        "instance_id": task.name,
        "repository": json.dumps(task.repository),
        "protected": [task.test_file],
        "tests": json.dumps([{"script": script, "output": output} for script, output in task.tests]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the parquet files")
    folder = parser.parse_args().output
    rows = [row(task) for task in TASKS]
    write_split(folder, "train", rows[:8], 0)
    write_split(folder, "validation", rows[8:], 0)


if __name__ == "__main__":
    main()
