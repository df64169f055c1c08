"""python -m skyrl_train.entrypoints.check_config key=value ...: what is wrong with a configuration, if anything.

Starts nothing. Exit code 0 and "config ok" with notes and warnings, or 2 and every problem at once.
"""

from __future__ import annotations

from skyrl_train.config.prepare import PreparedConfig, launch


def main() -> None:
    launch(report)


def report(prepared: PreparedConfig) -> None:
    print("config ok")


if __name__ == "__main__":
    main()
