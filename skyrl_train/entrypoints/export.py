"""skyrl-train export RUN/global_step_N --to FOLDER | hub:NAME: a checkpoint's policy as a model that others can load.

It reads the checkpoint by itself, in one process, without the run's cluster, from a folder or an s3:// or file://
address, whatever strategy and number of ranks wrote it. The result is loaded again and compared with the checkpoint
before it appears: docs/export.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from skyrl_train.config.redaction import redact
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.terminal import print_stderr, print_stdout


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    from skyrl_train.experiment.export import ExportRequest, describe_verification, export

    try:
        where, agreement = export(ExportRequest(**vars(given)))
    except (SkyRLError, OSError) as error:  # such as a disk that is full
        print_stderr(redact(f"skyrl-train export: {error}"))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    print_stdout("Not verified." if agreement is None else describe_verification(agreement))
    print_stdout(f"exported to {where}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="skyrl-train export", description=__doc__.partition(": ")[2])
    parser.add_argument("checkpoint", metavar="RUN/global_step_N", help="a folder, or an address")
    parser.add_argument("--to", required=True, metavar="FOLDER | hub:NAME", help="where it appears, whole")
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: adapters alone, not merged")
    parser.add_argument("--dtype", default="float32", help="of merged or whole weights: float32 or bfloat16")
    parser.add_argument("--base", metavar="MODEL", help="where the model is now that the run started from")
    parser.add_argument("--public", action="store_true", help="a repository that everybody sees; private without")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is there")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not load it again")
    return parser


if __name__ == "__main__":
    main()
