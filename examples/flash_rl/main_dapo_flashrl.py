"""SkyRL's FlashRL entry point is refused: it needs a vLLM that FlashRL has patched."""

from __future__ import annotations

import sys


def main() -> None:
    print(
        "FlashRL samples with weights of 8 bits through a vLLM that it patches, which this package does not run: "
        "use examples.tis_correction.main_tis_dapo, whose importance weights correct for any engine.",
        file=sys.stderr,
    )
    sys.exit(2)


if __name__ == "__main__":
    main()
