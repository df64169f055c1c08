"""Write the datasets of a verifiers environment as parquet files in SkyRL's row format.

python examples/verifiers/verifiers_dataset.py --env my-env --args '{"difficulty": 2}' --output ~/data/my-env
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

from skyrl_train.data.conversion import write_split
from skyrl_train.environments.integrations.verifiers import make_rows
from skyrl_train.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", required=True, help="name of an installed environment")
    parser.add_argument("--args", type=json.loads, default={}, help="arguments of its load_environment, as JSON")
    parser.add_argument("--output", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--limit", type=int, help="maximum number of rows of each split")
    arguments = parser.parse_args()
    settings = {"env_id": arguments.env, "env_args": arguments.args}
    try:
        for split in ("train", "validation"):
            write_split(arguments.output, split, list(itertools.islice(make_rows(settings, split), arguments.limit)), 0)
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
