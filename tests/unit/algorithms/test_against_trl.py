"""Compares values and gradients of our losses with those of trl; see docs/reference/algorithm_differences.md."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from skyrl_train.algorithms.reductions import assign_loss_weights
from skyrl_train.config.algorithm import AlgorithmConfig, CISPOConfig, OffPolicyCorrectionConfig
from skyrl_train.config.schema import Config
from skyrl_train.data.batch import TrainBatch
from skyrl_train.experiment.algorithm import (
    build_advantage_step,
    build_correction_steps,
    build_objective,
    build_reduction,
)
from skyrl_train.metrics import Metrics

SEEDS = range(4)
SAMPLES = 3
MAX_LENGTH = 32
"""The denominator of dr_grpo."""
LOW, HIGH = 0.2, 0.28

Loss = Callable[[TrainBatch, Tensor, Tensor], Tensor]
"""Maps (batch, log-probs [T], entropies [T]) to the scalar that is minimized."""


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return trl's trainers, imported without vLLM: otherwise they import it, and warn about its version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # trl sets it at import; monkeypatch restores it
        pytest.importorskip("trl")
        patch.setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda min_version=None: False)
        grpo_module = importlib.import_module("trl.trainer.grpo_trainer")
        rloo_module = importlib.import_module("trl.trainer.rloo_trainer")
    config = importlib.import_module("trl.trainer.grpo_config").GRPOConfig

    def arguments(**settings: Any) -> Any:
        fixed: dict[str, Any] = {"bf16": False, "use_cpu": True, "report_to": "none"}
        return config(output_dir=str(tmp_path_factory.getbasetemp() / "trl"), **fixed | settings)

    return SimpleNamespace(grpo=grpo_module.GRPOTrainer, rloo=rloo_module.RLOOTrainer, arguments=arguments)


def bare_trainer(trainers: SimpleNamespace, **settings: Any) -> SimpleNamespace:
    """Return the attributes that trl's methods read of a trainer, without model, data and generation.

    Settings are those of GRPOConfig.
    """
    args = trainers.arguments(**settings)
    return SimpleNamespace(
        args=args,
        accelerator=Accelerator(cpu=True),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=args.gradient_accumulation_steps,
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        beta=args.beta,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon_high,
        max_completion_length=args.max_completion_length,
        use_vllm=args.use_vllm,
        vllm_importance_sampling_correction=args.vllm_importance_sampling_correction,
        vllm_importance_sampling_mode=args.vllm_importance_sampling_mode,
        vllm_importance_sampling_clip_min=args.vllm_importance_sampling_clip_min,
        vllm_importance_sampling_clip_max=args.vllm_importance_sampling_clip_max,
        top_entropy_quantile=args.top_entropy_quantile,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
        entropy_coef=args.entropy_coef,
        _entropy_bonus_enabled=args.entropy_coef != 0,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def random_batch(seed: int, groups: int = 4) -> TrainBatch:
    """Return ragged float64 conversations of 1 to 12 tokens with gaps in the mask.

    The first group has equal rewards.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = groups * SAMPLES
    lengths = torch.randint(1, 13, (rows,), generator=generator)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < 0.8
    mask[lengths.cumsum(0) - 1] = True
    rewards = torch.randn(rows, generator=generator)
    rewards[:SAMPLES] = 0.5

    def near(center: Tensor) -> Tensor:
        return center + 0.3 * torch.randn(total, generator=generator, dtype=torch.float64)

    logprobs = near(torch.full((total,), -1.5, dtype=torch.float64))
    group_ids = torch.arange(rows) // SAMPLES
    status = torch.ones(rows, dtype=torch.bool)
    batch = TrainBatch(
        input_ids=torch.randint(3, 99, (total,), generator=generator),
        loss_mask=mask,
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        prompt_lengths=torch.zeros(rows, dtype=torch.int64),
        group_ids=group_ids,
        rewards=rewards,
        temperature=torch.ones(rows),
        status=status,
        min_versions=group_ids,
        max_versions=group_ids,
        rollout_logprobs=near(logprobs),
        old_logprobs=near(logprobs),
        ref_logprobs=near(logprobs),
    )
    return batch.with_tokens(advantages=our_advantages(batch, AlgorithmConfig()))


def our_advantages(batch: TrainBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    advantages = build_advantage_step(algorithm)(batch, Metrics()).token_advantages
    assert advantages is not None
    return advantages


def current_logprobs(batch: TrainBatch, seed: int = 9) -> tuple[Tensor, Tensor]:
    """Return log-probs [T] of the trained policy, with gradient, and entropies [T].

    Most log-probs are close to the old ones, and some are far from them.
    """
    assert batch.old_logprobs is not None
    noise = torch.randn(2, len(batch.input_ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (batch.old_logprobs + 0.4 * noise[0]).requires_grad_(), noise[1].abs()


def our_loss(batch: TrainBatch, logprobs: Tensor, entropies: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Return the loss of a mini-batch, from the configuration."""
    cfg = Config()
    cfg.trainer.algorithm = algorithm
    for correct in build_correction_steps(algorithm):
        batch = correct(batch, Metrics())
    weighted = assign_loss_weights(batch, build_reduction(cfg))
    tokens = int(batch.loss_mask.sum())
    return build_objective(algorithm)(weighted, logprobs, entropies, tokens, Metrics())


def trl_inputs(batch: TrainBatch, tokens: int | None = None) -> dict[str, Any]:
    """Return the padded tensors that trl's loss reads.

    All tokens are completions, and gaps in the mask are tool outputs.
    """
    empty = torch.zeros(len(batch), 0, dtype=torch.int64)
    last = batch.offsets[1:] - 1
    assert batch.advantages is not None and batch.old_logprobs is not None and batch.ref_logprobs is not None
    return {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": batch.padded(batch.input_ids),
        "completion_mask": batch.padded(torch.ones_like(batch.input_ids)),
        "tool_mask": batch.padded(batch.loss_mask.long(), fill=1),
        "advantages": batch.advantages[last],
        "old_per_token_logps": batch.padded(batch.old_logprobs),
        "ref_per_token_logps": batch.padded(batch.ref_logprobs),
        "num_items_in_batch": torch.tensor(int(batch.loss_mask.sum()) if tokens is None else tokens),
    }


def trl_loss(
    trainers: SimpleNamespace,
    batch: TrainBatch,
    logprobs: Tensor,
    entropies: Tensor,
    *,
    tokens: int | None = None,
    inputs: dict[str, Any] | None = None,
    **settings: Any,
) -> Tensor:
    """Return trl's `_compute_loss` of the batch; `tokens` is the count of the full accumulation window."""
    trainer = bare_trainer(trainers, **settings)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        batch.padded(logprobs),
        batch.padded(entropies),
        None,
    )
    return trainers.grpo._compute_loss(trainer, None, trl_inputs(batch, tokens) | (inputs or {}))


def assert_equal_losses(batch: TrainBatch, loss: Loss, reference: Loss) -> None:
    """Compare losses, and gradients with respect to log-probs."""
    results = []
    for function in (loss, reference):
        logprobs, entropies = current_logprobs(batch)
        value = function(batch, logprobs, entropies)
        value.backward()
        assert logprobs.grad is not None
        results.append((value.detach(), logprobs.grad))
    (our_value, our_gradient), (trl_value, trl_gradient) = results
    torch.testing.assert_close(our_value, trl_value, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(our_gradient, trl_gradient, rtol=1e-6, atol=1e-7)
    assert our_gradient.abs().max() > 1e-3


EQUAL_LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_reduction": "sequence_mean"}, {"loss_type": "grpo"}),
    "bnpo": ({"loss_reduction": "token_mean"}, {"loss_type": "bnpo"}),
    "dapo": ({"loss_reduction": "token_mean"}, {"loss_type": "dapo"}),
    "dr_grpo": ({"loss_reduction": "seq_mean_token_sum_norm"}, {"loss_type": "dr_grpo"}),
    "gspo": (
        {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "gspo of tokens": (
        {"policy_loss_type": "gspo", "loss_reduction": "token_mean"},
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    ),
    "luspo": (
        {"policy_loss_type": "gspo", "loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 1},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    "cispo": (
        # trl's epsilon_high is the bound itself, and it has no lower one.
        {
            "policy_loss_type": "cispo",
            "loss_reduction": "token_mean",
            "cispo": CISPOConfig(cispo_eps_clip_low=1.0, cispo_eps_clip_high=HIGH - 1),
        },
        {"loss_type": "cispo"},
    ),
    "sapo": ({"policy_loss_type": "sapo", "loss_reduction": "sequence_mean"}, {"loss_type": "sapo"}),
    "two-sided clipping": (
        {"policy_loss_type": "dual_clip", "clip_ratio_c": 1.5, "loss_reduction": "sequence_mean"},
        {"loss_type": "grpo", "delta": 1.5},
    ),
}
"""Name -> our keys under trainer.algorithm, trl's GRPOConfig."""

KL_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no KL": ({"use_kl_loss": False}, {"beta": 0.0}),
    "k3": ({"kl_estimator_type": "k3"}, {"beta": 0.3, "use_bias_correction_kl": False}),
    "k3_ratio": ({"kl_estimator_type": "k3_ratio"}, {"beta": 0.3, "use_bias_correction_kl": True}),
}


def make_settings(name: str, kl: str = "no KL", **settings: Any) -> tuple[AlgorithmConfig, dict[str, Any]]:
    """Return our keys and trl's settings for a row of EQUAL_LOSSES and one of KL_SETTINGS."""
    (keys, trl_settings), (kl_keys, kl_settings) = EQUAL_LOSSES[name], KL_SETTINGS[kl]
    base = {"eps_clip_low": LOW, "eps_clip_high": HIGH, "max_seq_len": MAX_LENGTH, "kl_loss_coef": 0.3}
    trl_base = {"epsilon": LOW, "epsilon_high": HIGH, "max_completion_length": MAX_LENGTH}
    return AlgorithmConfig(**base | keys | kl_keys), trl_base | trl_settings | kl_settings | settings


def score_with_trl(trainers: SimpleNamespace, kind: str, batch: TrainBatch, **settings: Any) -> dict[str, Any]:
    """Return the result of trl's `_generate_and_score_completions` for finished completions: advantages and ratios."""
    trainer = bare_trainer(
        trainers,
        num_generations=SAMPLES,
        generation_batch_size=len(batch),
        per_device_train_batch_size=len(batch),
        **settings,
    )
    old, reference = batch.old_logprobs, batch.ref_logprobs
    assert batch.rollout_logprobs is not None and old is not None and reference is not None
    scores = {"policy": batch.padded(old), "reference": batch.padded(reference)}
    ids, masks, rollout = (
        [values_of_row.tolist() for values_of_row in values.split(batch.lengths.tolist())]
        for values in (batch.input_ids, batch.loss_mask.long(), batch.rollout_logprobs)
    )
    prompts, texts = [[1]] * len(batch), [""] * len(batch)
    rewards = torch.where(batch.status, batch.rewards, torch.nan)
    logs: Any = defaultdict(list)
    logs["rewards"] = defaultdict(list)
    vars(trainer).update(
        model=SimpleNamespace(name="policy", training=True, is_gradient_checkpointing=False),
        ref_model=SimpleNamespace(name="reference"),
        environment_factories=None,
        environments=None,
        tools=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        _generate=lambda _: (
            (prompts, ids, masks, texts, rollout, {}, None, []) if kind == "grpo" else (prompts, ids, texts)
        ),
        _calculate_rewards=lambda *_: rewards[:, None],
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (scores[model.name], None, None),
        reward_weights=torch.ones(1),
        reward_func_names=["reward"],
        reward_clip_range=None,
        _logs=logs,
        _pending_extra_logs={},
        _pending_metrics={},
        log_multimodal=False,
        **{
            name: getattr(trainer.args, name, None)
            for name in (
                "num_generations",
                "num_iterations",
                "scale_rewards",
                "normalize_advantages",
                "multi_objective_aggregation",
                "mask_truncated_completions",
            )
        },
    )
    return getattr(trainers, kind)._generate_and_score_completions(trainer, [{"prompt": "1"}] * len(batch))


def uses_token_ratios(name: str) -> bool:
    """False for ratios of sequences: trl then corrects a token's KL by the ratio of its sequence, and we do not."""
    return "importance_sampling_level" not in EQUAL_LOSSES[name][1]


@pytest.mark.parametrize(
    ("name", "kl"),
    [(name, kl) for name in EQUAL_LOSSES for kl in KL_SETTINGS if kl != "k3_ratio" or uses_token_ratios(name)],
)
def test_losses_and_gradients_match_trl(trainers: SimpleNamespace, name: str, kl: str) -> None:
    algorithm, settings = make_settings(name, kl)
    for seed in SEEDS:
        assert_equal_losses(
            random_batch(seed), partial(our_loss, algorithm=algorithm), partial(trl_loss, trainers, **settings)
        )


def test_entropy_bonus_matches_trl_under_token_mean(trainers: SimpleNamespace) -> None:
    algorithm, settings = make_settings("dapo", entropy_coef=0.2)
    algorithm.use_entropy_loss, algorithm.entropy_loss_coef = True, 0.2
    assert_equal_losses(
        random_batch(0), partial(our_loss, algorithm=algorithm), partial(trl_loss, trainers, **settings)
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling_matches_trl(trainers: SimpleNamespace, level: str) -> None:
    algorithm, settings = make_settings("dapo", "k3", use_vllm=True, vllm_importance_sampling_mode=f"{level}_truncate")
    settings |= {"vllm_importance_sampling_clip_max": 1.1, "vllm_importance_sampling_clip_min": None}
    algorithm.off_policy_correction = OffPolicyCorrectionConfig(
        tis_ratio_type=level, token_tis_ratio_clip_high=1.1, sequence_tis_ratio_clip_high=1.1
    )
    for seed in SEEDS:
        batch = random_batch(seed)
        name = "importance_sampling_ratio"
        inputs = {name: score_with_trl(trainers, "grpo", batch, **settings)[name]}
        assert_equal_losses(
            batch, partial(our_loss, algorithm=algorithm), partial(trl_loss, trainers, inputs=inputs, **settings)
        )


@pytest.mark.parametrize(
    ("keys", "kind", "settings", "scale"),
    [
        # Large rewards: trl adds 1e-4 to the standard deviation, we 1e-6.
        ({"advantage_estimator": "grpo"}, "grpo", {}, 1000),
        ({"advantage_estimator": "dr_grpo"}, "grpo", {"scale_rewards": "none"}, 1),
        ({"advantage_estimator": "rloo"}, "rloo", {}, 1),
        (
            {"advantage_estimator": "rloo", "use_kl_in_reward": True, "kl_estimator_type": "k1", "kl_loss_coef": 0.2},
            "rloo",
            {"beta": 0.2},
            1,
        ),
    ],
)
def test_advantages_match_trl(
    trainers: SimpleNamespace, keys: dict[str, Any], kind: str, settings: dict[str, Any], scale: float
) -> None:
    for seed in SEEDS:
        batch = random_batch(seed)
        batch.rewards.mul_(scale)
        batch.status[4] = False  # trl: a reward of None
        batch = batch.with_tokens(loss_mask=batch.expand_to_tokens(batch.status))  # trl's RLOO does not support gaps
        last = batch.offsets[1:] - 1
        advantages = our_advantages(batch, AlgorithmConfig(**keys))[last]
        expected = score_with_trl(trainers, kind, batch, **settings)["advantages"]
        torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6, check_dtype=False)
        assert advantages[4] == 0
        assert advantages.abs().max() > 0.1


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "cispo", "bnpo"])
def test_trl_micro_batches_sum_to_our_mini_batch(trainers: SimpleNamespace, name: str) -> None:
    algorithm, settings = make_settings(name, "k3", gradient_accumulation_steps=2)
    batch = random_batch(0)
    logprobs, entropies = current_logprobs(batch)
    expected = our_loss(batch, logprobs, entropies, algorithm)
    losses, half = [], len(batch) // 2
    boundary = int(batch.offsets[half])
    for rows, tokens in ((range(half), slice(boundary)), (range(half, len(batch)), slice(boundary, None))):
        micro_batch = batch.select(list(rows)), logprobs[tokens], entropies[tokens]
        losses.append(trl_loss(trainers, *micro_batch, tokens=int(batch.loss_mask.sum()), **settings))
    assert torch.isclose(expected, torch.stack(losses).sum(), rtol=1e-6) == (name != "bnpo")


@pytest.mark.parametrize(("name", "factor"), [("grpo", 11 / 12), ("dr_grpo", 11 / 12), ("dapo", 1)])
def test_sequences_without_tokens_count_only_in_trl(trainers: SimpleNamespace, name: str, factor: float) -> None:
    algorithm, settings = make_settings(name)
    batch = random_batch(0)
    empty = batch.expand_to_tokens(torch.arange(len(batch)) == 7)
    assert_equal_losses(
        batch.with_tokens(loss_mask=batch.loss_mask & ~empty),
        lambda rows, logprobs, entropies: our_loss(rows, logprobs, entropies, algorithm) * factor,
        partial(trl_loss, trainers, **settings),
    )
