"""Write the ten tasks of tasks.py as train.parquet and validation.parquet in SkyRL's row format.

python -m examples.mini_swe_agent.mini_swe_dataset --output ~/data/mini_swe
python -m examples.mini_swe_agent.mini_swe_dataset --output ~/data/mini_swe_agent --agent
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from typing import Any

from examples.mini_swe_agent import hidden_tests
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


def agent_row(task: Task) -> dict[str, Any]:
    """Return a task as a row of the environment `agent`, whose files are the repository and whose grader is a program.

    The grader's files also restore the repository's own tests.
    """
    scripts = [{"script": script, "output": output} for script, output in task.tests]
    grader_files = {
        task.test_file: task.repository[task.test_file],
        "hidden_tests.py": inspect.getsource(hidden_tests),
        "hidden_tests.json": json.dumps({"module": task.test_file.removesuffix(".py"), "scripts": scripts}),
    }
    return {
        "data_source": "mini_swe",
        "prompt": [{"role": "user", "content": task.problem}],
        "env_class": "agent",
        "instance_id": task.name,
        "files": json.dumps(task.repository),
        "grader_files": json.dumps(grader_files),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--agent", action="store_true", help="write rows of the environment agent")
    arguments = parser.parse_args()
    folder = arguments.output
    rows = [(agent_row if arguments.agent else row)(task) for task in TASKS]
    write_split(folder, "train", rows[:8], 0)
    write_split(folder, "validation", rows[8:], 0)


if __name__ == "__main__":
    main()
