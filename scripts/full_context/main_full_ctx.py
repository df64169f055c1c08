"""Does the longest step fit? Trains on made-up tokens of full length: prompts of max_prompt_length, responses up to
generator.max_input_length and a whole turn more.

python -m scripts.full_context.main_full_ctx +trainer.num_dummy_steps=5 key=value ...

Engines, trainer and weight syncs are the run's own, so that memory is what a step of full length needs; nothing is
sampled, and nothing worth keeping is learnt. SkyRL's recipe of that name runs as it is.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.trajectory import Trajectory, TrajectoryGroup, Turn
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.base import Experiment, run_experiment
from skyrl_train.experiment.driver import exit_with_signal_status

KEY = "trainer.num_dummy_steps"
DEFAULT_STEPS = 5


class FullLengthRollouts:
    """Groups of made-up samples, the rewards of which differ; every one as long as the configuration allows."""

    def __init__(self, config: Any, tokenizer: Any):
        generator = config.generator
        self._samples = generator.n_samples_per_prompt
        self._prompt = config.trainer.max_prompt_length
        self._longest = max(generator.max_input_length, self._prompt) + generator.sampling_params.max_generate_length
        self._ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        self._temperature = generator.sampling_params.temperature or 1.0

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        made = random.Random(position)
        prompt_ids = made.choices(self._ids, k=self._prompt)
        count = self._longest - self._prompt
        items = []
        for sample in range(self._samples):
            ids, reward = made.choices(self._ids, k=count), float(sample % 2)
            turns = [Turn(0, count, reward, "length", 0, 0)]
            item = Trajectory.empty(prompt, sample, self._temperature)
            item.prompt_ids, item.response_ids, item.loss_spans = (
                to_token_array(prompt_ids),
                to_token_array(ids),
                [(0, count)],
            )
            item.turns, item.reward, item.stop_reason = turns, reward, "length"
            items.append(item)
        return TrajectoryGroup(prompt, items)


class FullContextExp(Experiment):
    """An experiment that is given its rollouts."""

    def build_generator(self, client: Any, environments: Any, *, evaluation: bool) -> Any:
        return FullLengthRollouts(self.config, self.tokenizer)


def with_steps(arguments: list[str]) -> list[str]:
    """The command line of a run of `num_dummy_steps` that evaluates and keeps nothing. Raises ConfigError."""
    kept = [one for one in arguments if one.lstrip("+").partition("=")[0] != KEY]
    given = [one.partition("=")[2] for one in arguments if one not in kept]
    steps = given[-1] if given else str(DEFAULT_STEPS)
    if not steps.isdecimal() or int(steps) < 1:
        raise ConfigError(f"{KEY}={steps}: must be a whole number of at least 1.")
    nothing = ("eval_before_train=false", "eval_interval=0", "ckpt_interval=0", "hf_save_interval=0")
    return [*kept, f"trainer.max_steps={steps}", *(f"trainer.{one}" for one in nothing), "trainer.resume_mode=none"]


@exit_with_signal_status()
def main() -> None:
    try:
        arguments = with_steps(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    run_experiment(FullContextExp, arguments)


if __name__ == "__main__":
    main()
