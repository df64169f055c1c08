"""The run that a configuration describes, as a table: slots, tokens, steps, and the seconds of those once measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_train.config.predicates import RunComponents, SlotCounts, count_run_slots, gpus_per_engine
from skyrl_train.config.schema import Config

if TYPE_CHECKING:
    from skyrl_train.experiment.memory_plan import SlotMemoryPlan

MEASURED = "measured by --probe"
_LOOKED_AT = 1000
"""Prompts whose mean length is taken for that of all."""


@dataclass(frozen=True)
class DataStats:
    """What is known of data.train_data."""

    prompts: int
    prompt_tokens: float
    """Mean number of tokens of a prompt."""


def compute_data_stats(cfg: Config) -> DataStats:
    """Read the training data as a run does. Raises what that raises."""
    from skyrl_train.data.chat import render_prompt
    from skyrl_train.data.messages import get_chat_template_kwargs
    from skyrl_train.experiment.data import build_prompts, build_tokenizer

    tokenizer = build_tokenizer(cfg)
    dataset = build_prompts(cfg, tokenizer, cfg.data.train_data, "data.train_data")
    looked_at = dataset.prompts[:_LOOKED_AT]
    options = cfg.generator.chat_template_kwargs
    lengths = [
        len(render_prompt(tokenizer, prompt.messages, get_chat_template_kwargs(prompt.env_extras, options)))
        for prompt in looked_at
    ]
    return DataStats(len(dataset), sum(lengths) / len(lengths))


def run_lines(
    cfg: Config, plans: Sequence[SlotMemoryPlan], data: DataStats | str, seconds: str = MEASURED
) -> Iterator[str]:
    """The table; `data` is a reason where the training data are not known. `seconds`: where those of a step stand."""
    counts = count_run_slots(cfg, RunComponents())
    yield ""
    yield "the run"
    table = [["slots", f"{counts.total:,}", _roles(cfg, plans, counts)]]
    table += _tokens(cfg, data)
    table += [["seconds a step", "?", seconds], ["hours", "?", seconds]]
    yield from align_columns(table, 1)


def _roles(cfg: Config, plans: Sequence[SlotMemoryPlan], counts: SlotCounts) -> str:
    each = (
        "an accelerator" if cfg.device == "cuda" else f"{_share(cfg, counts.total)} of the {os.cpu_count()} CPUs here"
    )
    roles = ", ".join(f"{plan.count} x {plan.name}" for plan in plans)
    stride = gpus_per_engine(cfg.generator)
    nodes = cfg.trainer.placement.nodes_per_engine
    wide = f"; an engine has {stride}" + f" on {nodes} nodes" * (nodes > 1) if stride > 1 else ""
    hosts = cfg.environment.hosts
    beside = f"; beside them {hosts} environment hosts of {cfg.environment.host_cpus:g} CPUs" if hosts else ""
    return (
        f"{roles}; each {each}{wide}"
        + ("; engines and trainer take turns" if counts.engines_colocated else "")
        + beside
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
    asked = data.prompt_tokens if isinstance(data, DataStats) else generator.max_input_length
    answer, turns = generator.sampling_params.max_generate_length, generator.max_turns
    asks = f"{asked:,.0f} of a prompt, {'in the mean' if known else f'the most, as the data are not known: {data}'}"
    answers = f"{answer:,} of an answer, the most" + (f", in each of {turns} turns" if turns > 1 else "")
    tokens = f"{prompts * samples * (asked + answer * turns):,.0f}"
    yield ["tokens a step", tokens, f"{prompts:,} prompts x {samples:,} samples x ({asks} + {answers})"]
    limit = "" if trainer.max_steps is None else f", trainer.max_steps={trainer.max_steps:,}"
    if isinstance(data, DataStats):
        what = f"{data.prompts:,} prompts, {prompts:,} a step, trainer.epochs={trainer.epochs:,}{limit}"
        yield ["steps", f"{schedule.total_steps:,}", what]
    else:
        yield ["steps", "?", f"of {trainer.train_batch_size:,} prompts, trainer.epochs={trainer.epochs:,}{limit}"]


def align_columns(table: Sequence[Sequence[str]], words: int) -> Iterator[str]:
    """Lines of a table: the first `words` columns begin, the others but the last end below each other."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        texts, numbers = row[:words], row[words:-1]
        cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
        cells += [text.rjust(width) for text, width in zip(numbers, widths[words:], strict=False)]
        yield ("  " + "  ".join([*cells, row[-1]])).rstrip()
