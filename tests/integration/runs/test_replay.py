"""Runs with everything that a replay must do again: penalties, masks, corrections, KL in rewards that adapts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Run
from .replays import assert_replays

RECIPES = {
    "masks": [
        "trainer.algorithm.advantage_estimator=rloo",
        "trainer.algorithm.policy_loss_type=gspo",
        "trainer.algorithm.zero_variance_filter=true",
        "trainer.algorithm.overlong_buffer.len=8",
        "generator.sampling_params.stop=[e]",
        "generator.zero_reward_on_non_stop=true",
        "generator.apply_overlong_filtering=true",
    ],
    "kl": [
        "trainer.algorithm.advantage_estimator=reinforce++",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.kl_loss_coef=0.05",
        "trainer.algorithm.kl_ctrl.type=adaptive",
        "trainer.algorithm.kl_ctrl.kl_target=0.01",
        "trainer.algorithm.kl_ctrl.horizon=100",
        "trainer.algorithm.advantage_batch_normalize=true",
    ],
    "corrections": [
        "generator.model_dtype=float16",
        "trainer.policy_mini_batch_size=2",
        "trainer.algorithm.advantage_estimator=opo",
        "trainer.algorithm.policy_loss_type=clip_cov",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence",
        "trainer.algorithm.off_policy_correction.sequence_tis_ratio_clip_high=1.0",
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.9999",
    ],
}


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_replayed_bit_for_bit(recipe: str, run: Run, easy: Callable[[Path], list[str]], tmp_path: Path):
    keeps = ["trainer.keep_rollouts=all", "trainer.dump_data_batch=true", "trainer.max_steps=3", "trainer.epochs=2"]
    run("main_base", *easy(tmp_path), *keeps, *RECIPES[recipe])
    answer = assert_replays(tmp_path)
    assert len(answer.steps) == 3
    if recipe == "corrections":
        assert all(0 < numbers["tokens/masked"] < 1 for numbers in answer.old)
        assert all(numbers["importance_weights/mean"] < 1 for numbers in answer.old)
    if recipe == "kl":
        assert len({numbers["policy/kl_coef"] for numbers in answer.old}) == 3
