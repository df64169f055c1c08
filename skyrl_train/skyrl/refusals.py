"""What of SkyRL's classes has no counterpart here, and what to use instead."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from skyrl_train.errors import ConfigError

_LOOP = "the loop is skyrl_train.trainer.trainer.Trainer: change its parts in Experiment.build_trainer"
_SYNC = "weights are synchronised, and engines put to sleep and woken, by the run itself"
_RANKS = "models are behind `Experiment.session().learner`, which scores and updates whole batches"
_INSTEAD = {
    "policy_model": _RANKS,
    "critic_model": _RANKS,
    "ref_model": _RANKS,
    "build_models": _RANKS,
    "fwd_logprobs_values_reward": _RANKS,
    "train_critic_and_policy": _RANKS,
    "convert_to_training_input": _LOOP,
    "pad_batch": "batches are ragged and need no padding",
    "handle_dynamic_sampling": "see trainer.algorithm.dynamic_sampling",
    "train_dataloader": "prompts come from train_dataset, in an order that follows from trainer.seed",
    "eval_dataloader": "prompts come from eval_dataset",
    "save_checkpoints": "checkpoints are written by themselves: trainer.ckpt_interval, and whatever ends a run",
    "load_checkpoints": "a run resumes by itself: trainer.resume_mode",
    "save_models": "models are exported by themselves: trainer.hf_save_interval",
    "init_weight_sync_state": _SYNC,
    "sync_policy_weights_to_inference_engines": _SYNC,
    "sleep": _SYNC,
    "wake_up": _SYNC,
    "pause_generation": _SYNC,
    "resume_generation": _SYNC,
    "abort_generation": _SYNC,
    "init_weight_update_communicator": _SYNC,
    "update_named_weights": _SYNC,
    "teardown": _SYNC,
    "_setup_trainer": "override get_trainer, or `train` of the trainer that it returns",
    "generate": "return a generator of your own from get_generator",
    "agent_loop": "write an environment with several turns, or override `generate`",
    "generate_batched": "override `generate`",
}
TRAINERS = frozenset(_INSTEAD) - {"_setup_trainer", "agent_loop", "generate_batched"}
"""Methods of SkyRL's trainer that nothing calls here."""


def refuse_overrides(kind: type, ours: type, names: Collection[str]) -> None:
    """Raises ConfigError if a subclass of `ours` has replaced a method that nothing would call."""
    own = kind.__mro__[: kind.__mro__.index(ours)]
    for name in sorted(names):
        if any(name in vars(one) for one in own):
            advice = _INSTEAD.get(name, "docs/from_skyrl.md says what may be overridden")
            raise ConfigError(
                f"{kind.__name__}.{name}: nothing of skyrl_train calls it, so it must not be there: {advice}."
            )


def refuse(owner: str, name: str) -> NoReturn:
    """Raises AttributeError that says where else what `owner.name` is for in SkyRL is to be had."""
    instead = _INSTEAD.get(name)
    told = f"{instead}. docs/from_skyrl.md has the whole table" if instead else "docs/from_skyrl.md says what it has"
    raise AttributeError(f"{owner} of skyrl_train has no {name!r}: {told}.", name=name, obj=None)
