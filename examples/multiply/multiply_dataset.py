"""Write generated multiplications as train.parquet and validation.parquet in SkyRL's row format; needs no download.

python examples/multiply/multiply_dataset.py --output ~/data/multiply --digits 4 --train-size 10000 --test-size 200
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from skyrl_train.data.conversion import write_split
from skyrl_train.environments.tasks.multiply import generate
from skyrl_train.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="folder for the two parquet files")
    parser.add_argument("--digits", type=int, default=4, help="digits of both factors, from 1 to 12")
    parser.add_argument("--train-size", type=int, default=10000)
    parser.add_argument("--test-size", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        for name, size in (("train", arguments.train_size), ("validation", arguments.test_size)):
            write_split(arguments.output, name, generate(size, arguments.digits, arguments.seed, name))
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
