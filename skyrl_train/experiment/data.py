"""Tokenizer, prompts and demonstrations from the configuration."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.config.generator import ChatTemplateConfig, GeneratorConfig
from skyrl_train.config.schema import Config
from skyrl_train.data.batch import SFTExample
from skyrl_train.data.chat import render_prompt, render_sft_sequences, template_rewrites_history
from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.data.control_tokens import find_end_of_turn_token
from skyrl_train.data.dataset import DatasetRow, PromptDataset, load_prompts, read_rows
from skyrl_train.data.messages import Prompt, get_chat_template_kwargs, parse_messages, parse_tools
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.models.loading import has_tokenizer, load_tokenizer

log = logging.getLogger(__name__)


def build_tokenizer(cfg: Config) -> Any:
    """Return the policy's tokenizer with the configured chat template.

    Raises:
        ConfigError: The chat template cannot be read, or several turns are configured and the template cannot render
            them append-only.
    """
    tokenizer = load_tokenizer(
        cfg.trainer.policy.model.path,
        use_fast=not cfg.trainer.disable_fast_tokenizer,
        chat_template=load_chat_template(cfg.generator.chat_template),
    )
    _check_history(cfg, tokenizer)
    end = find_end_of_turn_token(tokenizer, cfg.generator.chat_template_kwargs)
    if end is not None and end != tokenizer.eos_token_id:
        name = tokenizer.convert_ids_to_tokens(end)
        log.info("Answers also end at %r (token %d), the token with which the chat template closes them.", name, end)
    return tokenizer


def check_same_tokens(policy_path: str, path: str, key: str) -> None:
    """Check that a model's tokenizer assigns the same ids to the policy's tokens.

    Added tokens are ignored: models of one family may differ in control tokens that were added later and in the padding
    of their vocabulary. A folder without a tokenizer cannot be checked and is accepted.

    Args:
        policy_path: Path or hub name of the policy.
        path: Path or hub name of the other model.
        key: The configuration key of `path`, for the message.

    Raises:
        ConfigError: A token of the policy has another id, or none, in the other tokenizer.
    """
    if path == policy_path or not has_tokenizer(path):
        return
    policy, other = load_tokenizer(policy_path), load_tokenizer(path, key=key).get_vocab()
    added = policy.added_tokens_decoder
    differing = [
        token for token, index in policy.get_vocab().items() if index not in added and other.get(token) != index
    ]
    if differing:
        raise ConfigError(
            f"{key}={path!r}: {len(differing)} tokens of the policy ({policy_path!r}), such as {differing[0]!r}, "
            "have another id or none in this model's tokenizer, so it would read other text than was sampled. Use a "
            "model with the policy's tokenizer."
        )


def load_chat_template(template: ChatTemplateConfig) -> str | None:
    """Return the text of the configured chat template; None for the tokenizer's own.

    Raises:
        ConfigError: The template's file cannot be read.
    """
    if template.name_or_path is None:
        return None
    if template.source == "name":
        return TEMPLATES[template.name_or_path]
    try:
        return Path(template.name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"generator.chat_template.name_or_path={template.name_or_path!r} cannot be read ({error}). With "
            "generator.chat_template.source=file it must be the path of a Jinja chat template."
        ) from error


def chat_template_text(tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> str | None:
    """Return the text of the Jinja template that renders conversations, or None if there is not exactly one.

    Args:
        tokenizer: Hugging Face tokenizer. It has no single template if it has none, or if it selects one of several
            depending on the tools of a conversation.
        chat_template_kwargs: Arguments of `apply_chat_template`. "chat_template" is the name or text of the template to
            use instead of the tokenizer's default.
    """
    name = chat_template_kwargs.get("chat_template")
    template = tokenizer.get_chat_template(name) if name else getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else None


def _check_history(cfg: Config, tokenizer: Any) -> None:
    """Raise ConfigError if the template rewrites earlier turns, so that token ids would not be append-only."""
    generator = cfg.generator
    if generator.max_turns == 1 or not generator.use_conversation_multi_turn or generator.step_wise_trajectories:
        return
    try:
        rewrites = template_rewrites_history(tokenizer, dict(generator.chat_template_kwargs))
    except DataError as error:
        raise ConfigError(
            f"generator.max_turns={generator.max_turns}: the tokenizer of {cfg.trainer.policy.model.path!r} cannot "
            f"render a multi-turn conversation ({error}). Name a template in generator.chat_template.name_or_path."
        ) from error
    if rewrites:
        raise ConfigError(
            f"generator.max_turns={generator.max_turns}: the chat template of {cfg.trainer.policy.model.path!r} "
            "renders earlier turns differently once others follow (without their reasoning, or without the text that "
            "its header puts before an answer), so the tokens of a conversation are not append-only. Set "
            "generator.step_wise_trajectories=true, which trains on what the model read at every turn, or name a "
            "template that keeps the history in "
            "generator.chat_template.name_or_path (qwen3_with_thinking for Qwen3)."
        )


def build_prompts(
    cfg: Config, tokenizer: Any, sources: Sequence[str], key: str, first_prompt_timeout_s: float | None = None
) -> PromptDataset:
    """Return the prompts of `sources` that are not longer than trainer.max_prompt_length.

    Logs the number of longer prompts, which are left out.

    Args:
        cfg: The configuration.
        tokenizer: The policy's tokenizer.
        sources: Files, folders or hub names of the data.
        key: The configuration key of the sources, for the log.
        first_prompt_timeout_s: Stop at the first prompt that is short enough, or after this many seconds; the result
            may then be empty. None reads everything.

    Raises:
        DataError: A row cannot be used, or no prompt is short enough.
    """
    options, limit = dict(cfg.generator.chat_template_kwargs), cfg.trainer.max_prompt_length

    def length(prompt: Prompt) -> int:
        return len(render_prompt(tokenizer, prompt.messages, get_chat_template_kwargs(prompt.env_extras, options)))

    dataset = load_prompts(
        sources, length, limit, cfg.environment.env_class, first_prompt_timeout_s=first_prompt_timeout_s
    )
    if dataset.too_long and first_prompt_timeout_s is None:
        log.warning(
            "%s: %d of %d prompts are longer than trainer.max_prompt_length=%d tokens and are left out.",
            key,
            dataset.too_long,
            dataset.too_long + len(dataset),
            limit,
        )
    return dataset


def check_eval_data_sources(cfg: Config, dataset: PromptDataset | None) -> None:
    """Check that evaluation prompts have the data sources of generator.eval_n_samples_by_data_source.

    Raises:
        ConfigError: No prompt has one of them.
    """
    sources = {prompt.data_source for prompt in dataset.prompts} if dataset is not None else set()
    for source, samples in cfg.generator.eval_n_samples_by_data_source.items():
        if dataset is not None and source not in sources:
            raise ConfigError(
                f"generator.eval_n_samples_by_data_source.{source}={samples}: no row of data.val_data has this "
                f"data_source; choose of {sorted(sources)}."
            )


def num_eval_answers(generator: GeneratorConfig, dataset: PromptDataset | None) -> int:
    """Return the number of answers that an evaluation of the dataset samples."""
    samples = generator.eval_n_samples_by_data_source
    prompts = dataset.prompts if dataset is not None else ()
    return sum(samples.get(prompt.data_source, generator.eval_n_samples_per_prompt) for prompt in prompts)


def build_sft_examples(
    cfg: Config, tokenizer: Any, first_example_timeout_s: float | None = None
) -> tuple[list[SFTExample], str]:
    """Return the tokenized conversations of the `messages` column and a fingerprint of all of them.

    A conversation is one example, or one example per answer where the chat template rewrites earlier turns. Examples
    longer than max_prompt_length + max_generate_length tokens are left out; their number is logged.

    Args:
        cfg: The configuration.
        tokenizer: The policy's tokenizer.
        first_example_timeout_s: Stop at the first example that is short enough, or after this many seconds; the result
            may then be empty. None reads everything.

    Raises:
        DataError: A row is not a conversation, has no answer to train on, or the chat template does not render all of
            its text; the message names the row. Also if no example is left.
    """
    limit = cfg.trainer.max_prompt_length + cfg.generator.sampling_params.max_generate_length
    options = dict(cfg.generator.chat_template_kwargs)
    examples: list[SFTExample] = []
    digest = hashlib.sha256()
    too_long = 0
    start_s = time.monotonic()
    for source in cfg.data.train_data:
        for where, row in read_rows(source):
            for ids, mask in _sequences(where, row, tokenizer, options):
                if len(ids) > limit:
                    too_long += 1
                    continue
                digest.update(repr((ids, mask)).encode())
                examples.append(SFTExample(ids, mask))
            if first_example_timeout_s is not None and (
                examples or time.monotonic() - start_s > first_example_timeout_s
            ):
                return examples, digest.hexdigest()[:32]
    if not examples:
        raise DataError(
            f"data.train_data={list(cfg.data.train_data)!r}: no demonstration of at most {limit} tokens "
            "(trainer.max_prompt_length + generator.sampling_params.max_generate_length)."
        )
    if too_long:
        log.warning("data.train_data: %d demonstrations of more than %d tokens are left out.", too_long, limit)
    return examples, digest.hexdigest()[:32]


def _sequences(
    where: str, row: DatasetRow, tokenizer: Any, options: dict[str, Any]
) -> list[tuple[list[int], list[bool]]]:
    """Return the token ids and loss masks of a row. Raises DataError that names the row."""
    if row.get("messages") is None:
        raise DataError(
            f"{where}: no 'messages' among its columns {sorted(row)}; a row of supervised fine-tuning must be a "
            "conversation."
        )
    messages = parse_messages(where, "messages", row["messages"])
    if tools := parse_tools(where, row.get("tools")):
        options = {**options, "tools": tools}
    try:
        sequences = render_sft_sequences(tokenizer, messages, options)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not any(any(mask) for _, mask in sequences):
        raise DataError(
            f"{where}: its messages hold no answer of the assistant to train on. Add an answer, or leave the row out."
        )
    return sequences
