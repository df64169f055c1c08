"""SkyRL's Harbor entry point, which exits with an error because it needs Harbor's service."""

from __future__ import annotations

import sys


def main() -> None:
    print(
        "Harbor runs its tasks on its own service, for which this package has no client. Use "
        "examples.mini_swe_agent.main_mini_swe for agents with a shell, or write a GeneratorInterface that calls the service.",
        file=sys.stderr,
    )
    sys.exit(2)


if __name__ == "__main__":
    main()
