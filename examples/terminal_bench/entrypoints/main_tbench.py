"""SkyRL's Terminal-Bench entry point, which exits with an error because it needs Harbor, Terminal-Bench's new name."""

from __future__ import annotations

import sys


def main() -> None:
    print(
        "Terminal-Bench runs its tasks in containers of its own harness, for which this package has no client. Use "
        "examples.mini_swe_agent.main_mini_swe for agents with a shell, or write a GeneratorInterface that calls it.",
        file=sys.stderr,
    )
    sys.exit(2)


if __name__ == "__main__":
    main()
