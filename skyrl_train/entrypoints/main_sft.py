"""Supervised fine-tuning: `python -m skyrl_train.entrypoints.main_sft key=value ...`

The same learner, optimizer keys and folders as training with rewards. Rows of data.train_data have a `messages` column;
what the assistant says in it is learnt. trainer.train_batch_size counts rows; the model is exported when the run ends.
"""

from __future__ import annotations

from pathlib import Path

from skyrl_train.config.predicates import Uses
from skyrl_train.config.sources import is_address
from skyrl_train.experiments.base import Experiment, start
from skyrl_train.experiments.restarts import rank_losses
from skyrl_train.experiments.stopping import exits_as_told
from skyrl_train.report.phases import phase
from skyrl_train.storage.places import working_folder


class SFTExp(Experiment):
    """An experiment without engines, environments or rewards."""

    uses = Uses(val_data=False, engines=False, rewards=False)

    def get_train_dataset(self) -> None:  # type: ignore[override]
        """Demonstrations are read when the run starts."""

    get_eval_dataset = get_train_dataset  # type: ignore[assignment]

    def run(self) -> None:
        folder = self._until_told(self._with_restarts(self._train))
        export_path = self.config.trainer.export_path
        inside = folder.relative_to(working_folder(export_path))
        print(f"exported to {export_path.rstrip('/')}/{inside}" if is_address(export_path) else f"exported to {folder}")

    async def _train(self) -> Path:
        from skyrl_train.assembly.algorithm import sft_learning
        from skyrl_train.assembly.data import build_demonstrations
        from skyrl_train.assembly.memory_fit import announce_fit
        from skyrl_train.assembly.services import (
            build_batch_dump,
            build_profiles,
            build_state,
            fingerprints_of,
            learner_services,
            schedule_of,
            start_learner,
        )
        from skyrl_train.data.dataset import PromptOrder
        from skyrl_train.trainer.guards import Guards
        from skyrl_train.trainer.trainer import SFTTrainer

        trainer, learning = self.config.trainer, sft_learning(self.config)
        demonstrations, fingerprint = build_demonstrations(self.config, self.tokenizer)
        schedule = schedule_of(trainer, len(demonstrations))
        fingerprints = fingerprints_of(trainer, fingerprint)
        async with learner_services(
            self.config,
            self.cluster,
            fingerprints=fingerprints,
            schedule=schedule,
            learning=learning,
            fitted=announce_fit(self.config, learning).trainer,
            build_tracker=self.build_tracker,
        ) as base:
            assert base.learner is not None
            with phase("models", "processes of the trainer that load them"):
                await start_learner(base.learner, trainer)
            sft = SFTTrainer(
                demonstrations=demonstrations,
                index_at=PromptOrder(len(demonstrations), trainer.seed).row,
                schedule=schedule,
                cfg=trainer,
                learner=base.learner,
                state=build_state(base, fingerprints, {}, self.tokenizer),
                trackers=base.trackers,
                guards=Guards(trainer.guards, None),
                batch_dump=build_batch_dump(trainer),
                profiles=build_profiles(base),
            )
            sft.restarts = self.restarts
            async with rank_losses(base.learner, trainer.restarts):
                return await sft.fit_and_export()


@exits_as_told()
def main() -> None:
    start(SFTExp)


if __name__ == "__main__":
    main()
