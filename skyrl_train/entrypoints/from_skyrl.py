"""python -m skyrl_train.entrypoints.from_skyrl RECIPE.sh: the command line for this package of a recipe of SkyRL's.

Reads a shell script without running it and prints the command that starts SkyRL, 0.3's (skyrl_train) or today's
(skyrl.train), with the modules and keys of this package. What differs is explained on standard error; exit code 2 if
something cannot be honoured. Variables that the script lets its caller set are taken from the environment.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

import yaml

import skyrl_train
from skyrl_train.config.hydra import Override, parse_override, to_override_literal
from skyrl_train.config.keys import canonical_key, canonical_value
from skyrl_train.config.prepare import custom_key_path, prepare_config
from skyrl_train.config.problems import format_value
from skyrl_train.config.schema import Config
from skyrl_train.config.skyrl_keys import find_skyrl_key
from skyrl_train.errors import ConfigError
from skyrl_train.skyrl.shell_parser import (
    UNEXPANDED_MARKERS,
    ShellCommand,
    ShellScript,
    display_word,
    parse_commands,
    quote_word,
    unexpanded_parts,
)
from skyrl_train.terminal import print_stderr

REPOSITORY = Path(skyrl_train.__file__).resolve().parents[1]
MODULE_PREFIXES = {
    "skyrl.train.": "skyrl_train.",
    "examples.train_scripts.": "scripts.",
    "examples.train_integrations.": "integrations.",
    "examples.train.algorithms.dapo.main_dapo_fully_async": "examples.fully_async.main_fully_async",
    "examples.train.": "examples.",
}
"""How the names of today's modules begin -> how those of the modules here do."""
SKYRL_MODULE_PREFIXES = ("skyrl_train.", "examples.", "integrations.", "scripts.")
"""How the names of modules begin that SkyRL has; any other is a program of the user's own."""
CURRENT_SKYRL_KEY = re.compile(r"generator\.inference_engine\.")
"""How keys begin that 0.3 does not have."""
SAMPLING = "generator.eval_sampling_params."
CURRENT_SKYRL_DEFAULTS = {
    f"{SAMPLING}temperature": "1.0",
    f"{SAMPLING}max_generate_length": "1024",
    "trainer.algorithm.cispo.cispo_eps_clip_low": "1.0",
    "trainer.algorithm.cispo.cispo_eps_clip_high": "4.0",
}
"""Defaults of today's SkyRL that differ from 0.3's, which are the ones here, and change results."""


@dataclass
class Translation:
    """A command line for this package."""

    module: str
    overrides: list[str] = field(default_factory=list)
    """As words of a shell: with `shell.MARKS` around what is left to it."""
    extras: list[str] = field(default_factory=list)
    """Extras of this package that the run needs."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What cannot be honoured, and why."""

    def __str__(self) -> str:
        extras = "".join(f" --extra {name}" for name in self.extras)
        return " \\\n  ".join([f"uv run{extras} -m {self.module}", *map(quote_word, self.overrides)])


def translate(
    text: str, path: str = "recipe.sh", arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Translation:
    """Return the command line for this package of a shell script that starts SkyRL.

    Args:
        text: The script.
        path: Its name, for messages and for what it says of its own folder.
        arguments: What the script is called with, its `$@`.
        environment: Variables that its caller sets.

    Raises ConfigError for a script that cannot be read, or that starts nothing of SkyRL's with `key=value` arguments.
    """
    return _translate(text, ShellScript(path, arguments=list(arguments), environment=environment or {}))


def _translate(text: str, script: ShellScript) -> Translation:
    path, arguments = script.path, list(script.arguments)
    every = list(parse_commands(text, script))
    started = [(*found, command.environment) for command in every if (found := _started(command.words))]
    if not started:
        return _translate_called_script(every, script)
    theirs, words, own_environment = started[-1]
    if theirs == "skyrl.train.main_sft" or (theirs.startswith("examples.train.") and "main_sft" in theirs):
        raise ConfigError(
            f"{path}: {theirs} has keys of its own, such as train_datasets and batch_size, which are not converted. "
            "Start skyrl_train.entrypoints.main_sft; docs/from_skyrl.md#fine-tuning has the key here for each."
        )
    done = Translation(_module_here(theirs), notes=[f"not followed: {line}" for line in script.unresolved])
    if ignored := [word for word in arguments if word not in words]:
        done.notes.append(f"the recipe does not pass on its arguments: {' '.join(ignored)} is left out.")
    if len(started) > 1:
        done.notes.append(f"{path} starts {len(started)} runs; this is the last one.")
    if exported := dict.fromkeys([*script.exported, *own_environment]):
        done.notes.append(f"the recipe exports {', '.join(exported)}; if the run needs them, export them, too.")
    if theirs != done.module:
        done.notes.append(f"{theirs} -> {done.module}")
    if not (REPOSITORY / f"{done.module.replace('.', '/')}.py").is_file() and done.module.startswith(
        SKYRL_MODULE_PREFIXES
    ):
        done.problems.append(f"{theirs} has no counterpart here: docs/from_skyrl.md says how its programs run.")
    is_todays = theirs.startswith(("skyrl.", "examples.train")) or any(map(CURRENT_SKYRL_KEY.match, words))
    _add_overrides(done, words, is_todays)
    _check(done, script.environment)
    return done


def _translate_called_script(every: Sequence[ShellCommand], script: ShellScript) -> Translation:
    """Translate the last script that a script calls, with the arguments and the variables that it gives it."""
    for command in reversed(every):
        program, *rest = dropwhile(lambda word: word in ("exec", "bash", "sh", "-x", "-e", "-ex"), command.words) or [
            ""
        ]
        if not program.endswith(".sh") or UNEXPANDED_MARKERS[0] in program:
            continue
        roots = (Path(), *Path(script.path).resolve().parents)
        paths = (root / program for root in roots if (root / program).is_file())
        for found in (path for path in paths if path.resolve() != Path(script.path).resolve()):
            variables = {name: script.variables[name] for name in script.exported if name in script.variables}
            variables |= {name: [value] for name, value in command.environment.items()}
            called = ShellScript(str(found), variables, rest, script.environment)
            done = _translate(found.read_text(encoding="utf-8"), called)
            done.notes.insert(0, f"{script.path} calls {program}.")
            return done
        raise ConfigError(f"{script.path} calls {program}, which was not found: name that script, and its arguments.")
    raise ConfigError(
        f"{script.path}: no command `... -m MODULE key=value ...` was found; loops and functions are not followed. "
        "Name a script that starts SkyRL."
    )


def _started(words: list[str]) -> tuple[str, list[str]] | None:
    """(module, arguments) of a command that starts a Python program with at least one `key=value`."""
    for at, word in enumerate(words):
        if word == "-m" and at + 1 < len(words):
            module, rest = words[at + 1], words[at + 2 :]
        elif word.endswith(".py") and not word.startswith("-"):
            module, rest = word.removesuffix(".py").removeprefix("./").replace("/", "."), words[at + 1 :]
        else:
            continue
        return (module, rest) if any(re.match(r"[+~]*\w[\w.]*=", one) for one in rest) else None
    return None


def _module_here(module: str) -> str:
    for theirs, ours in MODULE_PREFIXES.items():
        if module.startswith(theirs):
            return ours + module.removeprefix(theirs)
    return module


def _add_overrides(done: Translation, arguments: Sequence[str], is_current_skyrl: bool) -> None:
    """Add the arguments with this package's names of keys, without those that have no effect."""
    given: dict[str, str] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        key, plus = key.lstrip("+"), key[: len(key) - len(key.lstrip("+"))]
        if not equals or not re.fullmatch(r"~?\w[\w.@/]*", key):
            done.problems.append(f"{display_word(word)}: not key=value.")
            continue
        if parse_override(display_word(word)).error and not unexpanded_parts(word):
            try:
                value = to_override_literal(yaml.safe_load(value))
            except yaml.YAMLError:
                done.problems.append(f"{word}: its value is not valid YAML.")
                continue
        if find_skyrl_key(key) is not None:
            given[key] = value
            continue
        mine = Override(f"+{key}={value}", key, value)
        if not plus and custom_key_path(mine) and not done.module.startswith("skyrl_train."):
            plus = "+"  # a key of the program's own
        if (
            not unexpanded_parts(value)
            and canonical_value(canonical_key(key), read := parse_override(f"{key}={value}").value) != read
        ):
            value = format_value(canonical_value(canonical_key(key), read))
        given[f"{plus}{canonical_key(key)}"] = value
    if is_current_skyrl:
        for key, value in _current_skyrl_defaults(given):
            given[key] = value
            done.notes.append(f"{key}={value} is added: today's SkyRL has this default, 0.3 and this package another.")
        done.notes += _current_skyrl_differences(given)
    done.overrides += [f"{key}={value}" for key, value in given.items()]


def _current_skyrl_defaults(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    evaluates = any(key.startswith(SAMPLING) for key in given)
    clips = given.get("trainer.algorithm.policy_loss_type", "").strip("'\"") == "cispo"
    for key, value in CURRENT_SKYRL_DEFAULTS.items():
        if key not in given and (evaluates if key.startswith(SAMPLING) else clips):
            yield key, value


def _check(done: Translation, environment: Mapping[str, str]) -> None:
    """Add what the checks say, and leave out keys without effect."""
    for text in dict.fromkeys(text for word in done.overrides for text in unexpanded_parts(word)):
        if text != "$HOME" and text.removeprefix("$") not in environment:
            done.notes.append(f"{text} is left to your shell.")
    checked = [known for word in done.overrides if (known := _checkable(word, environment))]
    try:
        has_user_code = not done.module.startswith("skyrl_train.")
        prepared = prepare_config([*checked, "device=cuda"], has_accelerator=True, has_user_code=has_user_code)
    except ConfigError as error:
        done.problems += [line.strip() for line in str(error).splitlines()[1:]]
        return
    done.notes += [*prepared.notes, *prepared.warnings]
    done.overrides = [word for word in done.overrides if find_skyrl_key(word.partition("=")[0]) is None]
    done.extras = list(_extras(prepared.config))


def _current_skyrl_differences(given: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each key that has another meaning in today's SkyRL and is accepted."""
    for key, value in given.items():
        if key.endswith("sampling_params.repetition_penalty") and value not in ("1", "1.0"):
            yield f"{key}={display_word(value)}: today's SkyRL does not pass it to the engine; here it has its effect."
    step_wise = given.get("generator.step_wise_trajectories", "").lower() == "true"
    if step_wise and given.get("generator.merge_stepwise_output", "").lower() != "true":
        yield (
            "generator.step_wise_trajectories=true: turns that continue a sequence are one sequence, as with "
            "merge_stepwise_output=true. A mean over sequences (loss_reduction=sequence_mean) counts it once."
        )


def _checkable(word: str, environment: Mapping[str, str]) -> str | None:
    """Return an override with a stand-in for what only a shell knows; None if that is its whole value."""
    text = display_word(word, environment)
    for left in unexpanded_parts(word):
        if text.endswith(f"={left}"):
            return None
        if not re.fullmatch(r"\$\w+", left):
            text = text.replace(left, "x")
    return text


def _extras(config: Config) -> Iterator[str]:
    if config.generator.run_engines_locally and config.generator.backend in ("vllm", "sglang"):
        yield config.generator.backend
    trackers = [config.trainer.logger] if isinstance(config.trainer.logger, str) else config.trainer.logger
    yield from (name for name in trackers if name in ("mlflow", "trackio"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="from_skyrl", description="The command line for this package of a recipe.")
    parser.add_argument("recipe", help="a shell script that starts SkyRL; it is read, not run")
    parser.add_argument("arguments", nargs="*", help="what the script is called with: key=value")
    given = parser.parse_args(arguments)
    try:
        done = translate(Path(given.recipe).read_text(encoding="utf-8"), given.recipe, given.arguments, os.environ)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        print_stderr(f"{error}")
        sys.exit(2)
    print(done)
    for text in done.notes:
        print_stderr(f"note: {text}")
    for text in done.problems:
        print_stderr(f"refused: {text}")
    if done.problems:
        sys.exit(2)


if __name__ == "__main__":
    main()
