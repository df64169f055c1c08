from __future__ import annotations

import asyncio

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.pool import WorkerPool


@pytest.mark.fault("F14")
def test_endless_comparison_scores_zero_and_leaves_no_process():
    """All episodes share a process. The leak check verifies that its grader has ended when the pool is closed."""
    extras = {"reward_spec": {"method": "rule", "ground_truth": "42"}}
    prompt = Prompt(uid="0", messages=[], env_class="math", env_extras=extras, data_source="math")
    answers = [r"\boxed{9^{9^{9}}}", r"\boxed{\frac{84}{2}}", r"\boxed{10000000!}", r"\boxed{43}", r"\boxed{42.0}"]

    async def score(pool: WorkerPool, text: str) -> float:
        episode = await pool.start("math", prompt)
        return (await episode.step(text)).reward

    async def score_all() -> list[float]:
        async with WorkerPool({"math": {"timeout": 3.0}}, max_env_workers=1, environment_step_s=120.0) as pool:
            return await asyncio.gather(*(score(pool, text) for text in answers))

    assert asyncio.run(score_all()) == [0.0, 1.0, 0.0, 0.0, 1.0]
