"""Supervised fine-tuning: `python -m skyrl_train.entrypoints.main_sft key=value ...`

Learner, optimizer keys and folders are those of training with rewards. Rows of data.train_data have a `messages`
column; the model is trained on the assistant's messages in it. trainer.train_batch_size counts rows. The model is
exported when the run ends.
"""

from __future__ import annotations

from pathlib import Path

from skyrl_train.config.locations import is_uri
from skyrl_train.config.predicates import RunComponents
from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.experiment.driver import exit_with_signal_status
from skyrl_train.report.progress_log import startup_phase
from skyrl_train.storage.uris import resolve_local_folder


class SFTExp(Experiment):
    """An experiment without engines, environments or rewards."""

    components = RunComponents(val_data=False, engines=False, rewards=False)

    def get_train_dataset(self) -> None:  # type: ignore[override]
        """Return None: demonstrations are read when the run starts."""

    get_eval_dataset = get_train_dataset  # type: ignore[assignment]

    def run(self) -> None:
        folder = self._run_until_signaled(self._with_restarts(self._train))
        export_path = self.config.trainer.export_path
        relative_path = folder.relative_to(resolve_local_folder(export_path))
        print(
            f"exported to {export_path.rstrip('/')}/{relative_path}" if is_uri(export_path) else f"exported to {folder}"
        )

    async def _train(self) -> Path:
        from skyrl_train.experiment.algorithm import build_sft_objective_spec
        from skyrl_train.experiment.data import build_sft_examples
        from skyrl_train.experiment.learner import start_learner
        from skyrl_train.experiment.restarts import raise_lost_ranks
        from skyrl_train.experiment.run_resources import start_run_resources
        from skyrl_train.experiment.trainer import build_sft_trainer

        trainer, objective_spec = self.config.trainer, build_sft_objective_spec(self.config)
        sft_examples, fingerprint = build_sft_examples(self.config, self.tokenizer)
        async with start_run_resources(
            self.config,
            self.cluster,
            self.components,
            objective_spec=objective_spec,
            num_prompts=len(sft_examples),
            train_data=fingerprint,
            build_tracker=self.build_tracker,
        ) as base:
            assert base.learner is not None
            with startup_phase("models", "the trainer loads its models"):
                await start_learner(base.learner, trainer)
            sft = build_sft_trainer(base, tokenizer=self.tokenizer, sft_examples=sft_examples)
            sft.restarts = self.restarts
            async with raise_lost_ranks(base.learner, trainer.restarts):
                return await sft.fit_and_export()


@exit_with_signal_status()
def main() -> None:
    """Fine-tune with the arguments of the process. Exits as `launch_experiment` does."""
    launch_experiment(SFTExp)


if __name__ == "__main__":
    main()
