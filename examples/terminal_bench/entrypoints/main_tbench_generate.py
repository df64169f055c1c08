"""SkyRL's Terminal-Bench entry points are refused: they need Harbor, as Terminal-Bench is called now."""

from __future__ import annotations

import sys


def main() -> None:
    print(
        "Terminal-Bench runs its tasks in containers of its own harness, which this package has no client of: use "
        "examples.mini_swe_agent.main_mini_swe for agents with a shell, or write a GeneratorInterface that calls it.",
        file=sys.stderr,
    )
    sys.exit(2)


if __name__ == "__main__":
    main()
