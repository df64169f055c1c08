"""The runs to record. An unhealthy run is the healthy one with a few changes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.experiment.base import Experiment

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))

import quickstart
from unhealthy_parts import MisreportedLogprobs, Outliers

PRESETS = Path(__file__).parents[2] / "examples" / "algorithms"
Keys = Mapping[str, object]


@dataclass(frozen=True)
class Run:
    """A run to record. It starts from the quickstart's model after its warm-up by default."""

    keys: Keys
    preset: Path = quickstart.HERE / "grpo.yaml"
    experiment: type[Experiment] = Experiment
    environment: str = "arithmetic"
    """The environment of the training rows. Evaluation rows stay as they are."""
    random_model: bool = False
    """True to start from a random model, which rarely ends a response."""
    teacher_run: str = ""
    """The name of another run whose model is the reference; empty for none."""


HEALTHY: Keys = {
    "trainer.max_steps": 24,
    "trainer.train_batch_size": 8,
    "trainer.policy_mini_batch_size": 8,
    "trainer.eval_interval": 6,
    "trainer.ckpt_interval": -1,
    "trainer.algorithm.use_kl_loss": "true",
    "generator.weight_sync_check": "off",
    "trainer.plugins": "[unhealthy_parts]",
}
ASYNC: Keys = {
    "trainer.placement.colocate_all": "false",
    "trainer.fully_async.enabled": "true",
    "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
    "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high": 2.0,
}
"""The keys of config/async.yaml."""
ANSWER_TOKENS = "generator.sampling_params.max_generate_length"
BATCH, MINI_BATCH = "trainer.train_batch_size", "trainer.policy_mini_batch_size"
LEARNING_RATE, KL = "trainer.policy.optimizer_config.lr", "trainer.algorithm.kl_loss_coef"
EVALUATION = "trainer.eval_interval"
SAMPLES, STALENESS = "generator.n_samples_per_prompt", "trainer.fully_async.max_staleness_steps"
MAY_FAIL = "trainer.max_failed_fraction"


def _variant(steps: int, keys: Keys | None = None, **rest: object) -> Run:
    """Return the healthy run with another number of steps, without evaluations, and with further changes."""
    changed = {"trainer.max_steps": steps, EVALUATION: -1, "trainer.eval_before_train": "false", **(keys or {})}
    return Run({**HEALTHY, **changed}, **rest)  # type: ignore[arg-type]


LONG: Keys = {ANSWER_TOKENS: 1000, "trainer.timeouts.rollout_s": 1, MAY_FAIL: 0.9}
SLOW_ENGINE: Keys = {**ASYNC, ANSWER_TOKENS: 1000, BATCH: 2, MINI_BATCH: 2, SAMPLES: 2, STALENESS: 1}
SLOW_LEARNER: Keys = {**ASYNC, "trainer.update_epochs_per_batch": 8, LEARNING_RATE: 1e-5, STALENESS: 1}
HUGE: Keys = {BATCH: 64, MINI_BATCH: 64, "trainer.max_tokens_per_microbatch": 65536}

UNHEALTHY = {
    "no_difference": _variant(6, environment="samereward"),
    "trainer_starved": _variant(10, SLOW_ENGINE, environment="letters", random_model=True),
    "engines_starved": _variant(8, SLOW_LEARNER),
    "truncated": _variant(5, {ANSWER_TOKENS: 16}, environment="letters", random_model=True),
    "format_never_met": _variant(6, environment="aime"),
    "entropy_collapse": _variant(16, {LEARNING_RATE: 1e-3, KL: 0.0}, environment="fours"),
    "kl_runs_away": _variant(12, {LEARNING_RATE: 1e-3, KL: 1e-6}, environment="fours"),
    "engine_and_trainer_disagree": _variant(8, experiment=MisreportedLogprobs),
    "gradient_spikes": _variant(26, {"trainer.algorithm.advantage_estimator": "dr_grpo"}, experiment=Outliers),
    "episodes_fail": _variant(5, {MAY_FAIL: 0.9}, environment="raises"),
    "long_answers_are_cut": _variant(5, LONG, environment="letters", random_model=True),
    "evaluation_falls": _variant(14, {LEARNING_RATE: 3e-4, EVALUATION: 2}, environment="endsinfour"),
    "memory_near_its_limit": _variant(3, HUGE),
}
"""Name of the rule that must report the run -> the run."""


OF_PRESETS: Keys = {
    "device": "cpu",
    "environment.env_class": "arithmetic",
    "trainer.epochs": 100,
    "trainer.max_steps": 12,
    BATCH: 16,
    MINI_BATCH: 8,
    "trainer.critic_mini_batch_size": 8,
    "trainer.max_tokens_per_microbatch": 16384,
    "trainer.gradient_checkpointing": "false",
    LEARNING_RATE: 1e-4,
    "trainer.policy.optimizer_config.adam_betas": "[0.9,0.95]",
    "trainer.policy.optimizer_config.num_warmup_steps": 5,
    "trainer.critic.optimizer_config.lr": 3e-4,
    EVALUATION: -1,
    "trainer.eval_before_train": "false",
    "trainer.ckpt_interval": -1,
    "trainer.hf_save_interval": -1,
    "trainer.logger": "console",
    SAMPLES: 8,
    ANSWER_TOKENS: 48,
}
"""Overrides of the presets, which are written for GSM8K, for a model of 1.5 million parameters."""


def _preset(path: Path) -> Run:
    keys: dict[str, object] = dict(OF_PRESETS)
    if path.stem == "dapo":
        keys["trainer.algorithm.overlong_buffer.len"] = 8  # of 48 tokens
    return Run(keys, path, teacher_run="quickstart" if path.stem == "distillation" else "")


RUNS = {
    "well": Run(HEALTHY),
    # A little more than three bursts. The engines have no work in the last six steps.
    "well_async": _variant(28, {**ASYNC, STALENESS: 6}),
    **{f"{rule}_ill": run for rule, run in UNHEALTHY.items()},
    "quickstart": Run({"trainer.hf_save_interval": 40}),
    # gsm8k.yaml only holds what the other presets share.
    **{f"preset_{path.stem}": _preset(path) for path in sorted(PRESETS.glob("*.yaml")) if path.stem != "gsm8k"},
}
"""Name of the recording's file -> the run."""
