"""skyrl-train export RUN/global_step_N --to FOLDER | hub:NAME: export a checkpoint's policy as a model.

It reads the checkpoint in one process, without the run's cluster, from a folder or an s3:// or file:// URI, with any
strategy and number of ranks. The result is loaded again and compared with the checkpoint before it appears:
docs/guides/export.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from skyrl_train.config.redaction import redact
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.terminal import print_stderr, print_stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process.

    Raises:
        SystemExit: With 2 for wrong arguments or an existing target, with 1 if the export failed.
    """
    options = _parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    from skyrl_train.experiment.export import ExportRequest, describe_verification, export

    try:
        location, verification = export(ExportRequest(**vars(options)))
    except (SkyRLError, OSError) as error:  # OSError: for example a full disk
        print_stderr(redact(f"skyrl-train export: {error}"))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    print_stdout("Not verified." if verification is None else describe_verification(verification))
    print_stdout(f"exported to {location}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="skyrl-train export", description=__doc__.partition(": ")[2])
    parser.add_argument("checkpoint", metavar="RUN/global_step_N", help="a folder or a URI")
    parser.add_argument("--to", required=True, metavar="FOLDER | hub:NAME", help="the target")
    parser.add_argument("--adapter", action="store_true", help="export only the adapters of a LoRA run, unmerged")
    parser.add_argument("--dtype", default="float32", help="dtype of a full or merged model: float32 or bfloat16")
    parser.add_argument("--base", metavar="MODEL", help="present location of the model that the run started from")
    parser.add_argument("--public", action="store_true", help="create a public repository; the default is private")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model at the target")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not load the result again")
    return parser


if __name__ == "__main__":
    main()
