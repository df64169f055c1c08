"""The run that a configuration describes as a table: slots, tokens, steps, and where measured seconds are printed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_train.config.predicates import RunComponents, SlotCounts, count_run_slots, gpus_per_engine
from skyrl_train.config.schema import Config

if TYPE_CHECKING:
    from skyrl_train.experiment.memory_plan import SlotMemoryPlan

PROBE_HINT = "`skyrl-train plan --probe` with the same arguments measures the seconds of a step."
_MAX_SAMPLED_PROMPTS = 1000
"""Number of prompts whose mean length stands for all of them."""


@dataclass(frozen=True)
class DataStats:
    """Statistics of data.train_data."""

    prompts: int
    prompt_tokens: float
    """Mean number of tokens of a prompt."""


def compute_data_stats(cfg: Config) -> DataStats:
    """Read the training data as a run does, and return its statistics.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
        DataError: A row cannot be used, or no prompt is short enough.
    """
    from skyrl_train.data.chat import render_prompt
    from skyrl_train.data.messages import get_chat_template_kwargs
    from skyrl_train.experiment.data import build_prompts, build_tokenizer

    tokenizer = build_tokenizer(cfg)
    dataset = build_prompts(cfg, tokenizer, cfg.data.train_data, "data.train_data")
    sample = dataset.prompts[:_MAX_SAMPLED_PROMPTS]
    options = cfg.generator.chat_template_kwargs
    lengths = [
        len(render_prompt(tokenizer, prompt.messages, get_chat_template_kwargs(prompt.env_extras, options)))
        for prompt in sample
    ]
    return DataStats(len(dataset), sum(lengths) / len(lengths))


def run_lines(
    cfg: Config, plans: Sequence[SlotMemoryPlan], data: DataStats | str, seconds: str = PROBE_HINT
) -> Iterator[str]:
    """Yield the lines of the table.

    Args:
        cfg: The configuration.
        plans: The memory plan of each kind of slot.
        data: Statistics of the training data, or why they are unknown.
        seconds: Line that says where the seconds of a step can be found; "" for none.
    """
    counts = count_run_slots(cfg, RunComponents())
    yield ""
    yield "the run"
    table = [["slots", f"{counts.total:,}", _roles(cfg, plans, counts)]]
    table += _tokens(cfg, data)
    yield from align_columns(table, 1)
    if seconds:
        yield f"  {seconds}"


def _roles(cfg: Config, plans: Sequence[SlotMemoryPlan], counts: SlotCounts) -> str:
    each = (
        "an accelerator" if cfg.device == "cuda" else f"{_share(cfg, counts.total)} of the {os.cpu_count()} CPUs here"
    )
    roles = ", ".join(f"{plan.count} x {plan.name}" for plan in plans)
    slots_per_engine = gpus_per_engine(cfg.generator)
    nodes = cfg.trainer.placement.nodes_per_engine
    engine_size = (
        f"; an engine has {slots_per_engine}" + f" on {nodes} nodes" * (nodes > 1) if slots_per_engine > 1 else ""
    )
    offload = cfg.trainer.placement.colocate_offload
    mode = f" (trainer.placement.colocate_offload={offload})" if offload is not None else ""
    num_hosts = cfg.environment.hosts
    hosts = f"; plus {num_hosts} environment hosts of {cfg.environment.host_cpus:g} CPUs" if num_hosts else ""
    return (
        f"{roles}; each {each}{engine_size}"
        + (f"; engines and trainer are colocated{mode}" if counts.engines_colocated else "")
        + hosts
    )


def _share(cfg: Config, slots: int) -> str:
    cpus = int((os.cpu_count() or 1) - cfg.environment.hosts * cfg.environment.host_cpus)
    return f"{max(1, cpus // max(1, slots))}"


def _tokens(cfg: Config, data: DataStats | str) -> Iterator[list[str]]:
    from skyrl_train.experiment.run_resources import build_schedule

    trainer, generator = cfg.trainer, cfg.generator
    known = isinstance(data, DataStats)
    schedule = build_schedule(trainer, data.prompts if isinstance(data, DataStats) else trainer.train_batch_size)
    prompts, samples = schedule.num_prompts_in_step(0), generator.n_samples_per_prompt
    prompt_tokens = data.prompt_tokens if isinstance(data, DataStats) else generator.max_input_length
    answer_tokens, turns = generator.sampling_params.max_generate_length, generator.max_turns
    prompt = (
        f"{prompt_tokens:,.0f} per prompt, {'on average' if known else f'the maximum, as the data are unknown: {data}'}"
    )
    answer = f"up to {answer_tokens:,} per answer" + (f" in each of {turns} turns" if turns > 1 else "")
    tokens = f"{prompts * samples * (prompt_tokens + answer_tokens * turns):,.0f}"
    yield ["tokens per step", tokens, f"{prompts:,} prompts x {samples:,} samples x ({prompt} + {answer})"]
    limit = "" if trainer.max_steps is None else f", trainer.max_steps={trainer.max_steps:,}"
    if isinstance(data, DataStats):
        note = f"{data.prompts:,} prompts, {prompts:,} per step, trainer.epochs={trainer.epochs:,}{limit}"
        yield ["steps", f"{schedule.total_steps:,}", note]
    else:
        yield ["steps", "unknown", f"of {trainer.train_batch_size:,} prompts, trainer.epochs={trainer.epochs:,}{limit}"]


def align_columns(table: Sequence[Sequence[str]], words: int) -> Iterator[str]:
    """Yield the lines of a table. The first `words` columns are aligned left, the others except the last one right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        texts, numbers = row[:words], row[words:-1]
        cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
        cells += [text.rjust(width) for text, width in zip(numbers, widths[words:], strict=False)]
        yield ("  " + "  ".join([*cells, row[-1]])).rstrip()
