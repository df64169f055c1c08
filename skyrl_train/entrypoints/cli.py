"""skyrl-train COMMAND: train models, and check, inspect and export runs.

Commands take the same `key=value` arguments as their modules, `python -m skyrl_train.entrypoints...`; COMMAND --help
lists them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import click

from skyrl_train.terminal import escape_last_resort_warnings

_ENTRYPOINTS = "skyrl_train.entrypoints"
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Commands parse their own arguments, including `--help`."""


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def main() -> None:
    """Run the command that the arguments of the process name."""
    escape_last_resort_warnings()


@main.group(help="Try environments.", name="env")
def environments() -> None:
    """Group the commands for environments."""


@main.group(help="Add engines to a running run, or remove them.", name="engines")
def engines() -> None:
    """Group the commands for engines."""


def _command(group: click.Group, name: str, module: str, help_text: str, *first: str) -> None:
    """Add a command that calls `main` of a module of this package.

    Args:
        group: The group that gets the command.
        name: The command's name.
        module: The module's name within this package.
        help_text: One line for the list of commands.
        first: Arguments that the command always gets, before those of the user.
    """

    @group.command(name, short_help=help_text, add_help_option=False, context_settings=_PASSED_ON)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        words = [group.name, name] if group is not main else [name]
        sys.argv = [f"skyrl-train {' '.join(filter(None, words))}", *first, *arguments]
        run: Callable[[], None] = importlib.import_module(f"{_ENTRYPOINTS}.{module}").main
        run()


_command(main, "train", "main_base", "Train with rewards.")
_command(main, "sft", "main_sft", "Fine-tune on conversations.")
_command(main, "generate", "main_generate", "Evaluate: sample and score, without training.")
_command(main, "export", "export", "Export a checkpoint as a model with a card: to a folder or hub:NAME.")
_command(main, "serve", "serve", "Serve engines over HTTP.")
_command(main, "check", "check_config", "Check a configuration; starts nothing.")
_command(main, "check-config", "check_config", "The same as check.")
_command(main, "plan", "check_config", "Predict memory, tokens and steps; with --probe also seconds.", "--plan")
_command(main, "watch", "watch", "Show runs in a browser: curves, diagnosis and all saved rollouts.")
_command(main, "report", "report", "Write one HTML file about runs, for reading offline.")
_command(main, "doctor", "doctor", "Check what this machine has for a run, and what is missing.")
_command(engines, "add", "engines", "N FOLDER: add N engines to the run in FOLDER.", "add")
_command(engines, "remove", "engines", "N FOLDER: remove N engines from the run in FOLDER.", "remove")
_command(environments, "try", "env_try", "Show a row's prompt and score completions, without a model.")

if __name__ == "__main__":
    main()
