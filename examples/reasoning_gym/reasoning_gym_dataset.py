"""Write tasks of reasoning_gym as train.parquet and validation.parquet in SkyRL's row format; nothing is downloaded.

python examples/reasoning_gym/reasoning_gym_dataset.py --output ~/data/reasoning_gym \\
    --task chain_sum --task '{"name": "leg_counting", "max_animals": 4}' --train 2000 --validation 100
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from skyrl_train.data.conversion import write_split
from skyrl_train.environments.integrations.reasoning_gym import make_rows
from skyrl_train.errors import ConfigError


def parse_task(text: str) -> tuple[str, dict[str, Any]]:
    """Parse the name of a task, or a JSON object with the name and the task's settings.

    Raises:
        ConfigError: The text begins like an object, but is not valid JSON or has no name.
    """
    if not text.startswith("{"):
        return text, {}
    try:
        settings = json.loads(text)
        return settings.pop("name"), settings
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--task {text!r}: must be a task name, or a JSON object with 'name' ({error!r}).") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", required=True, help="name, or JSON of name and settings; repeatable")
    parser.add_argument("--output", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--train", type=int, default=2000, help="rows of each task to train on")
    parser.add_argument("--validation", type=int, default=100, help="rows of each task to evaluate on")
    parser.add_argument("--seed", type=int, default=0, help="seed of training rows; evaluation uses the next one")
    arguments = parser.parse_args()
    try:
        tasks = [parse_task(text) for text in arguments.task]
        for name, count, seed in (
            ("train", arguments.train, arguments.seed),
            ("validation", arguments.validation, arguments.seed + 1),
        ):
            rows = [row for task, settings in tasks for row in make_rows(task, count, seed, settings)]
            write_split(arguments.output, name, rows, 0)
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
