"""skyrl-train COMMAND: everything that is done by hand before, with and beside a run.

Commands take the same `key=value` arguments as their modules, `python -m skyrl_train.entrypoints...`; COMMAND --help
says which.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import click

from skyrl_train.terminal import escape_last_resort_warnings

_ENTRYPOINTS = "skyrl_train.entrypoints"
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Commands read their arguments themselves, `--help` as well."""


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def main() -> None:
    escape_last_resort_warnings()


@main.group(help="Environments.", name="env")
def environments() -> None:
    pass


@main.group(help="Engines of a run under way.", name="engines")
def engines() -> None:
    pass


def _command(group: click.Group, name: str, module: str, what: str, *first: str) -> None:
    """Add a command that is the `main` of a module of this package; `first`: arguments that it always gets."""

    @group.command(name, short_help=what, add_help_option=False, context_settings=_PASSED_ON)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        words = [group.name, name] if group is not main else [name]
        sys.argv = [f"skyrl-train {' '.join(filter(None, words))}", *first, *arguments]
        run: Callable[[], None] = importlib.import_module(f"{_ENTRYPOINTS}.{module}").main
        run()


_command(main, "train", "main_base", "Train with rewards.")
_command(main, "sft", "main_sft", "Fine-tune on conversations.")
_command(main, "generate", "main_generate", "Evaluate: sample and score, without training.")
_command(main, "export", "export", "A checkpoint as a model with a card: a folder, or hub:NAME.")
_command(main, "serve", "serve", "Serve engines over HTTP.")
_command(main, "check", "check_config", "What is wrong with a configuration; starts nothing.")
_command(main, "check-config", "check_config", "The same as check.")
_command(main, "plan", "check_config", "What a run needs: memory, tokens, steps; with --probe also seconds.", "--plan")
_command(main, "watch", "watch", "Show runs in a browser: curves, diagnosis, all rollouts kept.")
_command(main, "report", "report", "One HTML file of runs, for reading offline.")
_command(main, "doctor", "doctor", "What this machine has for a run, and what is missing.")
_command(engines, "add", "engines", "N FOLDER: N engines more for the run in FOLDER.", "add")
_command(engines, "remove", "engines", "N FOLDER: N engines fewer.", "remove")
_command(environments, "try", "env_try", "Show a row's prompt and score completions, without a model.")

if __name__ == "__main__":
    main()
