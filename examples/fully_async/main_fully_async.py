"""SkyRL's fully asynchronous entry point, for its recipes: main_base with trainer.fully_async.enabled=true."""

from __future__ import annotations

import sys

from skyrl_train.entrypoints.main_base import BasePPOExp, start

ASYNC = ("trainer.fully_async.enabled=true",)


def main() -> None:
    start(BasePPOExp, [*ASYNC, *sys.argv[1:]])


if __name__ == "__main__":
    main()
