"""skyrl-train env try ENV --data FILE: show an environment's prompt and score completions without a model.

    skyrl-train env try gsm8k --data train.parquet --row 3 --completion "#### 18"
    skyrl-train env try my_env --data rows.jsonl --completions answers.jsonl trainer.plugins=[my_envs]

Registry, processes, deadlines and settings are those of a run with the same keys. Completions are the turns of an
episode, in order. Completions that are left when an episode has ended begin another episode on the same row. A line of
the completions file is a text, a list of texts, or an object with these as `completion` and optionally `row`.

Exit code 0, 1 if an episode failed, 2 for a mistake in configuration, data or completions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.redaction import redact
from skyrl_train.config.schema import Config
from skyrl_train.data.dataset import load_prompts
from skyrl_train.data.messages import Message, Prompt, append_assistant_text, get_chat_template_kwargs
from skyrl_train.environments import registry
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.errors import ConfigError, DataError, EnvironmentFailure
from skyrl_train.experiment.environments import environment_settings, pool_settings
from skyrl_train.registry import import_plugins
from skyrl_train.terminal import escape_control_chars, print_stderr, print_stdout

NO_LIMIT = 2**40
"""Maximum prompt length in tokens: prompts that are too long for training can still be tried."""


@dataclass(frozen=True)
class EpisodeInput:
    """A row, and the model's texts to play on it: the turns of one episode, or of several."""

    row: int
    texts: list[str]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process.

    Raises:
        SystemExit: With 0, with 1 if an episode failed, with 2 for a mistake in configuration, data or completions.
    """
    arguments = _parser().parse_intermixed_args(argv)
    try:
        code = _try(arguments)
    except ConfigError as error:
        print_stderr(redact(str(error)))
        code = 2
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="skyrl-train env try", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", metavar="ENV", help="name of the environment; the rows' env_class is ignored")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration, as for a run")
    parser.add_argument("--data", required=True, help=".parquet, .json or .jsonl file, folder, or name on the hub")
    parser.add_argument("--row", type=int, default=0, help="row of the data, from 0")
    completions = parser.add_mutually_exclusive_group()
    completions.add_argument(
        "--completion", action="append", help="the model's text; repeat it for more turns or episodes"
    )
    completions.add_argument(
        "--completions", type=Path, metavar="FILE.jsonl", help="completions of many episodes, one per line"
    )
    parser.add_argument("--model", help="folder or hub name of a tokenizer: also show the rendered prompt")
    for name in ("--config-name", "--config-dir"):
        parser.add_argument(name, help="a preset, as for a run")
    return parser


def _try(arguments: argparse.Namespace) -> int:
    cfg = _configuration(arguments)
    import_plugins(cfg.trainer.plugins)
    registry.check_environments([arguments.env], environment_settings(cfg))
    attempts = _episode_inputs(arguments)
    prompts = load_prompts([arguments.data], lambda prompt: 0, NO_LIMIT, arguments.env).prompts
    for attempt in attempts:
        if not 0 <= attempt.row < len(prompts):
            raise DataError(
                f"{arguments.data}: row {attempt.row} does not exist. Choose one from 0 to {len(prompts) - 1}."
            )
    own = {prompts[attempt.row].env_class for attempt in attempts} - {arguments.env}
    if own:
        print_stderr(
            f"note: the rows name their own env_class ({', '.join(sorted(own))}), which a run uses. To train with "
            f"{arguments.env}, remove the column env_class from the data."
        )
    return asyncio.run(_play_all(cfg, prompts, attempts, arguments.env, arguments.model))


def _configuration(arguments: argparse.Namespace) -> Config:
    invalid = [text for text in arguments.overrides if "=" not in text]
    if invalid:
        raise ConfigError(f"{invalid[0]!r} is not key=value. Give completions with --completion or --completions.")
    flags = [
        part
        for flag in ("config_name", "config_dir")
        if getattr(arguments, flag) is not None
        for part in (f"--{flag.replace('_', '-')}", getattr(arguments, flag))
    ]
    model = [f"trainer.policy.model.path={arguments.model}"] if arguments.model is not None else []
    required = [*model, f"environment.env_class={arguments.env}"]
    # Environments use no accelerator, so a preset for accelerators can be tried on a laptop.
    prepared = prepare_config([*flags, *arguments.overrides, *required], has_accelerator=True, trust_run_folder=False)
    for warning in prepared.warnings:
        print_stderr(f"warning: {redact(warning)}")
    return prepared.config


def _episode_inputs(arguments: argparse.Namespace) -> list[EpisodeInput]:
    """Return the episodes to play; without completions a single one that only shows its prompt."""
    if arguments.completions is None:
        return [EpisodeInput(arguments.row, arguments.completion or [])]
    try:
        lines = arguments.completions.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"--completions {arguments.completions}: {error.strerror}. Give a JSON Lines file of one episode per line."
        ) from error
    found = [
        _episode_input(f"{arguments.completions}, line {number}", line, arguments.row)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise DataError(f"--completions {arguments.completions}: the file has no lines. Write one episode per line.")
    return found


def _episode_input(where: str, line: bytes, row: int) -> EpisodeInput:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}. Correct the line.") from error
    if isinstance(value, dict):
        value, row = value.get("completion"), value.get("row", row)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or not isinstance(row, int):
        raise DataError(
            f'{where}: {line[:80]!r} is not "text", ["text of turn 1", ...] or {{"completion": either, "row": number}}.'
        )
    return EpisodeInput(row, texts)


async def _play_all(
    cfg: Config, prompts: Sequence[Prompt], attempts: Sequence[EpisodeInput], env: str, model: str | None
) -> int:
    tokenizer = None
    if model is not None:
        from skyrl_train.experiment.data import build_tokenizer  # torch

        tokenizer = build_tokenizer(cfg)
    rewards: list[float] = []
    started = failed = 0
    async with WorkerPool(**pool_settings(cfg)) as pool:
        for attempt in attempts:
            prompt = prompts[attempt.row]
            turns = _turns(prompt, cfg.generator.max_turns)
            row = replace(prompt, env_class=env, env_extras={**prompt.env_extras, "max_turns": turns})
            texts, is_first = deque(attempt.texts), True
            while texts or is_first:
                is_first, left, started = False, len(texts), started + 1
                _print(f"episode {started}: {env}, row {attempt.row}")
                try:
                    rewards.append(
                        await _play(pool, row, texts, turns, tokenizer, dict(cfg.generator.chat_template_kwargs))
                    )
                except EnvironmentFailure as failure:
                    failed += 1
                    _print(f"  FAILED: {failure} (in training the episode would be masked and counted under that kind)")
                    if texts and len(texts) == left:
                        _print(f"  completions not played, because the episode could not start: {left}")
                        break
    if started > 1 and (rewards or failed):
        mean = f", mean reward {sum(rewards) / len(rewards):g}" if rewards else ""
        _print(f"episodes: {started}, failed {failed}{mean}")
    return 1 if failed else 0


async def _play(
    pool: WorkerPool, row: Prompt, texts: deque[str], turns: int, tokenizer: Any, options: dict[str, Any]
) -> float:
    """Play one episode, and return its reward.

    Args:
        pool: Processes of the environments.
        row: The row, with its environment and settings.
        texts: Completions that have not been played. Each one is removed when it is played.
        turns: Maximum number of turns.
        tokenizer: Tokenizer to show the rendered prompt with, or None.
        options: Keyword arguments of the chat template.

    Raises:
        EnvironmentFailure: The episode failed.
    """
    episode = await pool.start(row.env_class, row)
    try:
        _show_messages(episode.messages)
        _show_metadata(episode.metadata)
        if tokenizer is not None:
            _show_rendered(tokenizer, episode.messages, get_chat_template_kwargs(row.env_extras, options))
        total, done, played = 0.0, False, 0
        while texts and played < turns and not done:
            text = texts.popleft()
            if played == 0:  # as in training, the answer continues a message of the assistant that ends the prompt
                text = str(append_assistant_text(episode.messages, text)[-1]["content"])
            _show_messages([{"role": "assistant", "content": text}])
            output = await episode.step(text)
            total, done, played = total + output.reward, output.done, played + 1
            _print(f"  turn {played}: reward {output.reward:g}{', done' if done else ''}")
            _show_metadata(output.metadata)
            _show_messages(output.observations)
        if played:
            end = "done" if done else f"ended by generator.max_turns={turns}" if played == turns else "not done yet"
            _print(f"  reward of the episode: {total:g} in {played} turn{'' if played == 1 else 's'}, {end}")
        return total
    finally:
        await episode.close()


def _turns(prompt: Prompt, max_turns: int) -> int:
    """Return the run's maximum number of turns, or the row's own if it is lower, as in training."""
    own = prompt.env_extras.get("max_turns")
    if own is None or own != own:
        return max_turns
    if isinstance(own, bool) or not isinstance(own, int | float) or own < 1 or own != int(own):
        raise DataError(f"row {prompt.uid}: max_turns={own!r} must be an integer of at least 1, or null.")
    return min(int(own), max_turns)


def _show_rendered(tokenizer: Any, messages: Sequence[Message], options: dict[str, Any]) -> None:
    from skyrl_train.data.chat import render_prompt

    ids = render_prompt(tokenizer, messages, options)
    _print(f"  as the model reads it, {len(ids)} tokens:")
    _lines("", tokenizer.decode(ids))
    is_other_token = tokenizer.unk_token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if not is_other_token and (unknown := ids.count(tokenizer.unk_token_id)):  # GPT-2's is also its end of text
        _print(
            f"  {unknown} of these tokens {'is' if unknown == 1 else 'are'} {tokenizer.unk_token}: the tokenizer has "
            "no token for this text. The model can neither read nor write it."
        )


def _show_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else json.dumps(content)
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        _lines(message["role"], text + (f" {json.dumps(more)}" if more else ""))


def _show_metadata(metadata: dict[str, Any]) -> None:
    if metadata:
        _lines("metadata", json.dumps(metadata))


def _lines(head: str, text: str) -> None:
    for number, line in enumerate(text.split("\n")):
        _print(f"    {head if number == 0 else '':>9} | {line}")


def _print(line: str) -> None:
    """Print a line with escaped control characters and without the contents of credential variables.

    Models, rows and environments wrote the text, so the terminal must not interpret it.
    """
    print_stdout(escape_control_chars(redact(line)))


if __name__ == "__main__":
    main()
