"""Check that the longest possible training step fits into memory.

python -m scripts.full_context.main_full_ctx +trainer.num_dummy_steps=5 key=value ...

The program trains on random tokens of full length: prompts of trainer.max_prompt_length, and responses up to
generator.max_input_length and one complete turn more. Engines, trainer and weight syncs are those of a run, so the
memory is that of a real step. It samples nothing and writes no checkpoints. SkyRL's recipe of this name runs unchanged.
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
    """A generator of groups with random tokens of the maximum length and with unequal rewards."""

    def __init__(self, config: Any, tokenizer: Any):
        generator = config.generator
        self._samples = generator.n_samples_per_prompt
        self._prompt = config.trainer.max_prompt_length
        self._longest = max(generator.max_input_length, self._prompt) + generator.sampling_params.max_generate_length
        self._ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        self._temperature = generator.sampling_params.temperature or 1.0

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        rng = random.Random(position)
        prompt_ids = rng.choices(self._ids, k=self._prompt)
        count = self._longest - self._prompt
        items = []
        for sample in range(self._samples):
            ids, reward = rng.choices(self._ids, k=count), float(sample % 2)
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
    """An experiment whose rollouts are random tokens of full length."""

    def build_generator(self, client: Any, environments: Any, *, evaluation: bool) -> Any:
        return FullLengthRollouts(self.config, self.tokenizer)


def with_steps(arguments: list[str]) -> list[str]:
    """Return the command line of a run of `num_dummy_steps` steps without evaluations and checkpoints.

    Raises:
        ConfigError: `trainer.num_dummy_steps` is not an integer of at least 1.
    """
    others = [argument for argument in arguments if argument.lstrip("+").partition("=")[0] != KEY]
    values = [argument.partition("=")[2] for argument in arguments if argument not in others]
    steps = values[-1] if values else str(DEFAULT_STEPS)
    if not steps.isdecimal() or int(steps) < 1:
        raise ConfigError(f"{KEY}={steps}: must be an integer of at least 1.")
    disabled = ("eval_before_train=false", "eval_interval=0", "ckpt_interval=0", "hf_save_interval=0")
    return [*others, f"trainer.max_steps={steps}", *(f"trainer.{key}" for key in disabled), "trainer.resume_mode=none"]


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
