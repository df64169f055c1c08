from __future__ import annotations

import asyncio
import resource

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.pool import WorkerPool

ANSWERS = 10_000


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def test_pool_scores_ten_thousand_answers_quickly():
    """Measures CPU time, because wall time means nothing on busy cores."""
    prompt = Prompt(
        uid="0",
        messages=[{"role": "user", "content": "How many?"}],
        env_class="gsm8k",
        env_extras={"reward_spec": {"method": "rule", "ground_truth": "18"}},
        data_source="openai/gsm8k",
    )

    async def score(pool: WorkerPool, number: int) -> float:
        episode = await pool.start("gsm8k", prompt)
        output = await episode.step(
            "She has 16 - 3 - 4 = 9 eggs and sells them for 2 each.\n" * 10 + f"#### {number % 20}"
        )
        await episode.close()
        return output.reward

    async def score_all() -> float:
        async with WorkerPool({}, max_env_workers=2, environment_step_s=240.0) as pool:
            return sum(await asyncio.gather(*(score(pool, number) for number in range(ANSWERS))))

    before = cpu_s()
    assert asyncio.run(score_all()) == ANSWERS / 20
    assert cpu_s() - before < 10.0
