"""Values that are allowed and that hardly anybody means: a warning, with what is usual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_train.config.inert import has_effect
from skyrl_train.config.keys import value_at
from skyrl_train.config.problems import one_line, show
from skyrl_train.config.schema import Config


@dataclass(frozen=True)
class Usual:
    """Bounds of what people choose, both included; 0 is always usual: it turns something off."""

    low: float
    high: float
    why: str
    """What a value beyond them does."""


_RATE = Usual(1e-9, 0.1, "AdamW moves every weight by about this much a step")
_USUAL = {
    "trainer.policy.optimizer_config.lr": _RATE,
    "trainer.critic.optimizer_config.lr": _RATE,
    "trainer.policy.optimizer_config.weight_decay": Usual(1e-6, 1.0, "weights shrink by lr times this a step"),
    "trainer.policy.optimizer_config.max_grad_norm": Usual(1e-3, 1e3, "gradients are scaled down to this norm"),
    "trainer.algorithm.kl_loss_coef": Usual(1e-6, 10.0, "the KL term is multiplied by this"),
    "trainer.algorithm.entropy_loss_coef": Usual(1e-6, 1.0, "the entropy is multiplied by this"),
    "trainer.algorithm.eps_clip_high": Usual(1e-5, 5.0, "ratios above 1 plus this are clipped"),
    "trainer.train_batch_size": Usual(1, 65_536, "a step waits for the rollouts of all of its prompts"),
    "trainer.epochs": Usual(1, 1_000, "the training data is passed over this often"),
    "generator.n_samples_per_prompt": Usual(1, 1_024, "a group has this many samples"),
    "generator.sampling_params.temperature": Usual(0.05, 2.0, "logits are divided by this"),
    "generator.sampling_params.max_generate_length": Usual(2, 262_144, "answers are cut at this many tokens"),
    "generator.gpu_memory_utilization": Usual(0.1, 0.98, "the engine takes this share of the accelerator"),
    "trainer.timeouts.rollout_s": Usual(1.0, 86_400.0, "an episode that takes longer is cut and masked"),
    "trainer.timeouts.environment_step_s": Usual(0.05, 86_400.0, "a call that takes longer is killed"),
}


def unusual(config: Config) -> Iterator[str]:
    """A line for every value beyond what is usual, if anything reads it."""
    for name, usual in _USUAL.items():
        value = value_at(config, name)
        if value and not usual.low <= value <= usual.high and has_effect(config, name):
            bounds = f"{usual.low:g} to {usual.high:g}"
            yield one_line(f"{name}={show(value)} is unusual: {usual.why}, and {bounds} is what runs have.")
