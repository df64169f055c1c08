"""skyrl-train replay RUN: what other rewards and algorithms would have made of the rollouts that a run kept.

    skyrl-train replay RUN                                             the run's own numbers once more: are they these?
    skyrl-train replay RUN --reward own                                its environments, on the recorded texts
    skyrl-train replay RUN --reward my_module:my_reward                a function of your own
    skyrl-train replay RUN --advantage rloo --loss gspo                another algorithm on the same samples
    skyrl-train replay RUN --steps 1-20 trainer.algorithm.loss_reduction=sequence_mean

No model is run: docs/replay.md says what its numbers are, and what no data can tell.

Exit code 0, 2 for a mistake in the configuration or a run without rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.config.hydra import CONFIG_FILE
from skyrl_train.config.prepare import PreparedConfig, prepare
from skyrl_train.config.secrets import redact
from skyrl_train.errors import ConfigError
from skyrl_train.messages import to_stderr
from skyrl_train.registry import import_plugins

if TYPE_CHECKING:
    from skyrl_train.replay.run import Question


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_intermixed_args(argv)
    try:
        _replay(arguments)
    except ConfigError as error:
        to_stderr(redact(str(error)))
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="skyrl-train replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run: trainer.ckpt_path")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what would have been otherwise")
    parser.add_argument("--reward", metavar="own|ENV|MODULE:FUNCTION", help="score the kept samples anew")
    parser.add_argument("--advantage", metavar="NAME", help="trainer.algorithm.advantage_estimator")
    parser.add_argument("--loss", metavar="NAME", help="trainer.algorithm.policy_loss_type")
    parser.add_argument("--steps", type=_steps, metavar="1-20,40", help="all that were kept, by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, for every step")
    parser.add_argument("--out", type=Path, metavar="FILE.parquet", help="write a row for every sample there")
    return parser


def _steps(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r}: must be steps and ranges of steps, such as 1-20,40")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def _replay(arguments: argparse.Namespace) -> None:
    question = _question(arguments)
    from skyrl_train.replay.answer import as_json, write_samples  # torch
    from skyrl_train.replay.report import lines
    from skyrl_train.replay.run import replay

    answer = asyncio.run(replay(question))
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines(answer):
        print(redact(line).encode(encoding, "backslashreplace").decode(encoding))
    for flag, file, write in (
        ("--json", arguments.json, lambda file: file.write_text(redact(as_json(answer)) + "\n")),
        ("--out", arguments.out, lambda file: write_samples(answer, file)),
    ):
        if file is not None:
            try:
                write(file)
            except OSError as error:
                raise ConfigError(f"{flag} {file}: cannot be written ({error.strerror}).") from error


def _question(arguments: argparse.Namespace) -> Question:
    """The run's configuration, and the same with what is asked for."""
    run = arguments.run
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"{run}: has no {CONFIG_FILE}; give the folder of a run, its trainer.ckpt_path.")
    wrong = [text for text in arguments.overrides if "=" not in text]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is not key=value.")
    overrides = [
        *arguments.overrides,
        *([f"trainer.algorithm.advantage_estimator={arguments.advantage}"] if arguments.advantage else []),
        *([f"trainer.algorithm.policy_loss_type={arguments.loss}"] if arguments.loss else []),
    ]
    own = _prepared(run, [])
    changed = _prepared(run, overrides) if overrides else own
    for text in (*changed.notes, *changed.warnings):
        if text not in (*own.notes, *own.warnings):
            to_stderr(f"warning: {redact(text)}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # of an installed command it is not there; functions and plugins often are
    import_plugins([*dict.fromkeys((*own.config.trainer.plugins, *changed.config.trainer.plugins))])
    from skyrl_train.replay.run import Question

    return Question(run, own.config, changed.config, arguments.reward, arguments.steps)


def _prepared(run: Path, overrides: Sequence[str]) -> PreparedConfig:
    flags = ["--config-dir", str(run), "--config-name", Path(CONFIG_FILE).stem]
    # Nothing is for a device, and a program of the user's own may have been what trained.
    return prepare([*flags, *overrides], has_accelerator=True, own_code=True)


if __name__ == "__main__":
    main()
