"""python -m skyrl_train.entrypoints.from_skyrl RECIPE.sh: convert a SkyRL recipe to a command line for this package.

Reads a shell script without running it. Prints the command that starts SkyRL-train 0.3 (skyrl_train) or current SkyRL
(skyrl.train) in it, with the modules and keys of this package. Differences are explained on standard error. The exit
code is 2 if a setting has no equivalent. Variables that the script lets its caller set are taken from the environment.
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
"""Prefixes of module names in current SkyRL -> the prefixes here."""
SKYRL_MODULE_PREFIXES = ("skyrl_train.", "examples.", "integrations.", "scripts.")
"""Prefixes of SkyRL's module names here. Any other module is a program of the user."""
NO_EQUIVALENT = {
    "harbor": "Harbor runs its tasks on a service of its own. environment.env_class=agent trains an agent in "
    "containers (docs/guides/agents.md).",
    "terminal_bench": "Terminal-Bench runs its tasks in containers of its own. environment.env_class=agent trains an "
    "agent in containers (docs/guides/agents.md).",
    "flash_rl": "FlashRL samples with 8-bit weights through a patched vLLM. examples.tis_correction.main_tis_dapo "
    "corrects for differences between engine and trainer.",
}
"""A part of a module's name -> why there is no such module here, and what to use."""
CURRENT_SKYRL_KEY = re.compile(r"generator\.inference_engine\.")
"""Matches keys that only current SkyRL has, not 0.3."""
SAMPLING = "generator.eval_sampling_params."
CURRENT_SKYRL_DEFAULTS = {
    f"{SAMPLING}temperature": "1.0",
    f"{SAMPLING}max_generate_length": "1024",
    "trainer.algorithm.cispo.cispo_eps_clip_low": "1.0",
    "trainer.algorithm.cispo.cispo_eps_clip_high": "4.0",
}
"""Defaults of current SkyRL that change results and differ from those of 0.3 and this package."""


@dataclass
class Translation:
    """A command line for this package."""

    module: str
    overrides: list[str] = field(default_factory=list)
    """Overrides as shell words. Parts that only a shell can expand are between UNEXPANDED_MARKERS."""
    extras: list[str] = field(default_factory=list)
    """Optional dependencies of this package that the run needs."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Settings that have no equivalent, and why."""

    def __str__(self) -> str:
        extras = "".join(f" --extra {name}" for name in self.extras)
        return " \\\n  ".join([f"uv run{extras} -m {self.module}", *map(quote_word, self.overrides)])


def translate(
    text: str, path: str = "recipe.sh", arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Translation:
    """Return the command line for this package of a shell script that starts SkyRL.

    Args:
        text: The script.
        path: The script's path, for messages and for expressions that refer to its own folder.
        arguments: The arguments that the script is called with, its `$@`.
        environment: Variables that the script's caller sets; None if it sets none.

    Raises:
        ConfigError: The script cannot be parsed, or starts no program of SkyRL with `key=value` arguments.
    """
    return _translate(text, ShellScript(path, arguments=list(arguments), environment=environment or {}))


def _translate(text: str, script: ShellScript) -> Translation:
    path, arguments = script.path, list(script.arguments)
    commands = list(parse_commands(text, script))
    started = [(*start, command.environment) for command in commands if (start := _started(command.words))]
    if not started:
        return _translate_called_script(commands, script)
    module, words, own_environment = started[-1]
    if module == "skyrl.train.main_sft" or (module.startswith("examples.train.") and "main_sft" in module):
        raise ConfigError(
            f"{path}: {module} has keys of its own, such as train_datasets and batch_size, which are not converted. "
            "Start skyrl_train.entrypoints.main_sft; docs/guides/from_skyrl.md#fine-tuning lists the keys."
        )
    translation = Translation(_module_here(module), notes=[f"not followed: {line}" for line in script.unresolved])
    if ignored := [word for word in arguments if word not in words]:
        translation.notes.append(f"the recipe does not pass on its arguments, so {' '.join(ignored)} is left out.")
    if len(started) > 1:
        translation.notes.append(f"{path} starts {len(started)} runs; only the last one is converted.")
    if exported := dict.fromkeys([*script.exported, *own_environment]):
        translation.notes.append(f"the recipe exports {', '.join(exported)}; export them, too, if the run needs them.")
    if module != translation.module:
        translation.notes.append(f"{module} -> {translation.module}")
    if not (REPOSITORY / f"{translation.module.replace('.', '/')}.py").is_file() and translation.module.startswith(
        SKYRL_MODULE_PREFIXES
    ):
        reasons = [reason for name, reason in NO_EQUIVALENT.items() if name in module.split(".")]
        advice = reasons or ["docs/guides/from_skyrl.md says how to run SkyRL's programs."]
        translation.problems.append(f"{module} has no equivalent here. {advice[0]}")
    if not translation.module.startswith(SKYRL_MODULE_PREFIXES):
        translation.notes.append(
            f"{module} is your own program and is not converted. Keep it importable, and change the imports that "
            "docs/guides/from_skyrl.md lists."
        )
    is_current_skyrl = module.startswith(("skyrl.", "examples.train")) or any(map(CURRENT_SKYRL_KEY.match, words))
    _add_overrides(translation, words, is_current_skyrl)
    _check(translation, script.environment)
    return translation


def _translate_called_script(commands: Sequence[ShellCommand], script: ShellScript) -> Translation:
    """Translate the last script that a script calls, with the arguments and variables that it passes on."""
    for command in reversed(commands):
        program, *rest = dropwhile(lambda word: word in ("exec", "bash", "sh", "-x", "-e", "-ex"), command.words) or [
            ""
        ]
        if not program.endswith(".sh") or UNEXPANDED_MARKERS[0] in program:
            continue
        roots = (Path(), *Path(script.path).resolve().parents)
        paths = (root / program for root in roots if (root / program).is_file())
        for script_path in (path for path in paths if path.resolve() != Path(script.path).resolve()):
            variables = {name: script.variables[name] for name in script.exported if name in script.variables}
            variables |= {name: [value] for name, value in command.environment.items()}
            called = ShellScript(str(script_path), variables, rest, script.environment)
            translation = _translate(script_path.read_text(encoding="utf-8"), called)
            translation.notes.insert(0, f"{script.path} calls {program}.")
            return translation
        raise ConfigError(
            f"{script.path} calls {program}, which was not found. Give that script and its arguments instead."
        )
    raise ConfigError(
        f"{script.path}: no command `... -m MODULE key=value ...` was found; loops and functions are not followed. "
        "Give a script that starts SkyRL."
    )


def _started(words: list[str]) -> tuple[str, list[str]] | None:
    """Return (module, arguments) of a command that starts a Python program with at least one `key=value`; else None."""
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


def _add_overrides(translation: Translation, arguments: Sequence[str], is_current_skyrl: bool) -> None:
    """Add the arguments under this package's key names. Keys without effect are left out by `_check`."""
    overrides: dict[str, str] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        key, plus = key.lstrip("+"), key[: len(key) - len(key.lstrip("+"))]
        if not equals or not re.fullmatch(r"~?\w[\w.@/]*", key):
            translation.problems.append(f"{display_word(word)} is not key=value.")
            continue
        if parse_override(display_word(word)).error and not unexpanded_parts(word):
            try:
                value = to_override_literal(yaml.safe_load(value))
            except yaml.YAMLError:
                translation.problems.append(f"{word}: its value is not valid YAML.")
                continue
        if find_skyrl_key(key) is not None:
            overrides[key] = value
            continue
        override = Override(f"+{key}={value}", key, value)
        if not plus and custom_key_path(override) and not translation.module.startswith("skyrl_train."):
            plus = "+"  # the program defines this key
        if (
            not unexpanded_parts(value)
            and canonical_value(canonical_key(key), read := parse_override(f"{key}={value}").value) != read
        ):
            value = format_value(canonical_value(canonical_key(key), read))
        overrides[f"{plus}{canonical_key(key)}"] = value
    if is_current_skyrl:
        for key, value in _current_skyrl_defaults(overrides):
            overrides[key] = value
            translation.notes.append(
                f"{key}={value} is added: it is the default of current SkyRL. SkyRL-train 0.3 and this package have "
                "another default."
            )
        translation.notes += _current_skyrl_differences(overrides)
    translation.overrides += [f"{key}={value}" for key, value in overrides.items()]


def _current_skyrl_defaults(overrides: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    evaluates = any(key.startswith(SAMPLING) for key in overrides)
    clips = overrides.get("trainer.algorithm.policy_loss_type", "").strip("'\"") == "cispo"
    for key, value in CURRENT_SKYRL_DEFAULTS.items():
        if key not in overrides and (evaluates if key.startswith(SAMPLING) else clips):
            yield key, value


def _check(translation: Translation, environment: Mapping[str, str]) -> None:
    """Add the results of the configuration checks, and remove keys without effect."""
    for text in dict.fromkeys(text for word in translation.overrides for text in unexpanded_parts(word)):
        if text != "$HOME" and text.removeprefix("$") not in environment:
            translation.notes.append(f"{text} is left to your shell.")
    checked = [checkable for word in translation.overrides if (checkable := _checkable(word, environment))]
    try:
        has_user_code = not translation.module.startswith("skyrl_train.")
        prepared = prepare_config([*checked, "device=cuda"], has_accelerator=True, has_user_code=has_user_code)
    except ConfigError as error:
        translation.problems += [line.strip() for line in str(error).splitlines()[1:]]
        return
    translation.notes += [*prepared.notes, *prepared.warnings]
    translation.overrides = [word for word in translation.overrides if find_skyrl_key(word.partition("=")[0]) is None]
    translation.extras = list(_extras(prepared.config))


def _current_skyrl_differences(overrides: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each accepted key whose meaning differs in current SkyRL."""
    for key, value in overrides.items():
        if key.endswith("sampling_params.repetition_penalty") and value not in ("1", "1.0"):
            yield f"{key}={display_word(value)}: current SkyRL does not pass it to the engine; here it takes effect."
    step_wise = overrides.get("generator.step_wise_trajectories", "").lower() == "true"
    if step_wise and overrides.get("generator.merge_stepwise_output", "").lower() != "true":
        yield (
            "generator.step_wise_trajectories=true: turns that continue a sequence become one sequence, as with "
            "merge_stepwise_output=true. A mean over sequences (loss_reduction=sequence_mean) counts it once."
        )


def _checkable(word: str, environment: Mapping[str, str]) -> str | None:
    """Return an override with placeholders for parts that only a shell can expand; None if its value is such a part."""
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
    """Run the command with these arguments, by default those of the process.

    Raises:
        SystemExit: With 2 if the script cannot be converted or a setting has no equivalent.
    """
    parser = argparse.ArgumentParser(prog="from_skyrl", description="Convert a SkyRL recipe for this package.")
    parser.add_argument("recipe", help="a shell script that starts SkyRL; it is read, not run")
    parser.add_argument("arguments", nargs="*", help="the arguments of the script: key=value")
    options = parser.parse_args(arguments)
    try:
        text = Path(options.recipe).read_text(encoding="utf-8")
        translation = translate(text, options.recipe, options.arguments, os.environ)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        print_stderr(f"{error}")
        sys.exit(2)
    print(translation)
    for note in translation.notes:
        print_stderr(f"note: {note}")
    for problem in translation.problems:
        print_stderr(f"refused: {problem}")
    if translation.problems:
        sys.exit(2)


if __name__ == "__main__":
    main()
