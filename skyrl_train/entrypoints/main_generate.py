"""Evaluation only: `python -m skyrl_train.entrypoints.main_generate key=value ...`

The engines load trainer.policy.model.path and answer the prompts of data.val_data. The scores are logged and printed.
No trainer is started.
"""

from __future__ import annotations

import json

from skyrl_train.config.predicates import RunComponents
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.experiment.driver import exit_with_signal_status


class EvaluationExp(Experiment):
    """An experiment that evaluates without training."""

    components = RunComponents(train_data=False, learner=False)

    def get_train_dataset(self) -> None:  # type: ignore[override]
        """Return None: an evaluation has no training data."""

    async def _run(self) -> None:
        from skyrl_train.experiment.run_resources import start_rollout_resources
        from skyrl_train.experiment.trainer import build_evaluator

        if self.eval_dataset is None:
            raise ConfigError(
                f"data.val_data={list(self.config.data.val_data)!r}: an evaluation needs data. Name a file or data "
                "set, and leave trainer.eval_before_train or trainer.eval_interval on."
            )
        async with start_rollout_resources(
            self.config,
            self.cluster,
            self.components,
            train_dataset=None,
            build_tracker=self.build_tracker,
            build_client=self.build_client,
        ) as running:
            generator = self.build_generator(running.client, running.environments, evaluation=True)
            scores = await build_evaluator(self.config, running, generator, self.eval_dataset).run(step=0)
            running.base.trackers.begin(0, 0)
            running.base.trackers.log(scores, 0)
        print(json.dumps(scores, indent=1))


@exit_with_signal_status()
def main() -> None:
    """Evaluate with the arguments of the process. Exits as `launch_experiment` does."""
    launch_experiment(EvaluationExp)


if __name__ == "__main__":
    main()
