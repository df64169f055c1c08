"""SkyRL's FlashRL entry point, which exits with an error because it needs a vLLM that FlashRL has patched."""

from __future__ import annotations

import sys


def main() -> None:
    print(
        "FlashRL samples with 8-bit weights through a patched vLLM, which this package does not support. "
        "Use examples.tis_correction.main_tis_dapo, whose importance weights correct for any engine.",
        file=sys.stderr,
    )
    sys.exit(2)


if __name__ == "__main__":
    main()
