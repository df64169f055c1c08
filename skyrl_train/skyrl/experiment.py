"""SkyRL's experiment: its hooks, with its signatures, over the parts of a run."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from skyrl_train.config.keys import replace_value
from skyrl_train.config.predicates import RunComponents
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.experiment.base import Experiment, Session, required_components
from skyrl_train.skyrl.script_entry import to_config, to_dictconfig
from skyrl_train.skyrl.unsupported import EXPERIMENT_REPLACEMENTS, raise_unsupported_attribute, reject_overrides
from skyrl_train.storage.uris import resolve_local_folder

if TYPE_CHECKING:
    from skyrl_train.data.dataset import PromptDataset
    from skyrl_train.experiment.run_resources import RolloutResources
    from skyrl_train.skyrl.client import InferenceEngineClient
    from skyrl_train.skyrl.interface import GeneratorInput, GeneratorOutput
    from skyrl_train.skyrl.trainer import RayPPOTrainer
    from skyrl_train.trainer.trainer import StepSchedule, Trainer


class BasePPOExp(Experiment):
    """An experiment whose parts come from SkyRL's hooks. Subclass it, and `run()` it, in a Ray task or not.

    `cfg` is what Hydra composed. `self.config` is its checked form, with what was fitted to this machine and with the
    run's folders, which everything here reads; `self.cfg` is the same as a DictConfig.

    Overriding a method of SkyRL's experiment that is not called here raises ConfigError when the class is defined.
    """

    components = RunComponents()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_overrides(cls, BasePPOExp, EXPERIMENT_REPLACEMENTS)

    def __init__(self, cfg: DictConfig | Config):
        from skyrl_train.skyrl.registries import load_program_registrations

        load_program_registrations()
        config = to_config(cfg, required_components(type(self)))
        self.adopt(config)
        self.colocate_pg = self.get_colocate_pg()
        super().__init__(config)
        os.makedirs(resolve_local_folder(config.trainer.export_path), exist_ok=True)

    def adopt(self, config: Config) -> None:
        super().adopt(config)
        self.cfg = to_dictconfig(config)

    # -- hooks -------------------------------------------------------------------------------------------------------

    @staticmethod
    def get_cfg_as_str(dict_cfg: DictConfig) -> str:
        return str(OmegaConf.to_yaml(dict_cfg))

    def get_tokenizer(self, padding_side: str = "left") -> Any:
        """The tokenizer of prompts and completions; with a token for padding, which SkyRL's code expects."""
        tokenizer = super().get_tokenizer()
        tokenizer.padding_side = padding_side
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def get_colocate_pg(self, timeout: int | None = None) -> Any:
        """None: slots are reserved when everything else is known, and handed to nobody."""
        return None

    def get_generator(self, cfg: DictConfig, tokenizer: Any, inference_engine_client: InferenceEngineClient) -> Any:
        """What turns prompts into trajectories: a GeneratorInterface."""
        from skyrl_train.skyrl.gym_generator import SkyRLGymGenerator

        return SkyRLGymGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            model_name=cfg.trainer.policy.model.path,
        )

    def get_trainer(
        self,
        cfg: DictConfig,
        tracker: Any,
        tokenizer: Any,
        train_dataset: Any,
        eval_dataset: Any,
        inference_engine_client: InferenceEngineClient,
        generator: Any,
        colocate_pg: Any,
    ) -> RayPPOTrainer:
        """Called with keywords."""
        from skyrl_train.skyrl.trainer import RayPPOTrainer

        return RayPPOTrainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
        )

    def get_tracker(self) -> Any:
        """None: those that trainer.logger names. Another object gets the numbers too: log(data, step, commit)."""

    def __getattr__(self, name: str) -> NoReturn:
        raise_unsupported_attribute(type(self).__name__, EXPERIMENT_REPLACEMENTS, name)

    # -- the run that they are parts of ------------------------------------------------------------------------------

    def as_prompts(self, dataset: Any) -> Any:
        return None if dataset is None else _prompts(dataset, self.config)

    def build_tracker(self, directory: Any) -> Any:
        from skyrl_train.report.trackers import Trackers

        usual, self._own_tracker = super().build_tracker(directory), self.get_tracker()
        own = self._own_tracker
        return usual if own is None else Trackers({"run": usual, "get_tracker": _SkyRLTracker(own)})

    def build_trainer(self, running: RolloutResources, schedule: StepSchedule | None = None) -> Trainer:
        from skyrl_train.experiment.trainer import build_trainer
        from skyrl_train.skyrl.client import InferenceEngineClient
        from skyrl_train.skyrl.trainer import StepMetricsTracker

        client = InferenceEngineClient(running.client, self.tokenizer, self.config)
        generator = self.get_generator(self.cfg, self.tokenizer, client)
        facade = self.get_trainer(
            cfg=self.cfg,
            tracker=StepMetricsTracker() if self._own_tracker is None else self._own_tracker,
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=generator,
            colocate_pg=self.colocate_pg,
        )
        self._skyrl_trainer = _validate_trainer(facade, self)
        rollouts = {
            False: self._rollouts(generator, running, False, self._skyrl_trainer.generate_override),
            True: self._rollouts(generator, running, True),
        }
        trainer = build_trainer(
            _without_overlong_buffer(self.config) if facade.overrides_rewards else self.config,
            running,
            tokenizer=self.tokenizer,
            train_generator=rollouts[False],
            eval_generator=rollouts[True],
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            schedule=schedule,
        )
        for one in rollouts.values():
            if hasattr(one, "connect"):
                one.connect(trainer)
        self._skyrl_trainer.connect(trainer)
        return trainer

    def _rollouts(
        self,
        generator: Any,
        running: RolloutResources,
        evaluation: bool,
        generate: Callable[[GeneratorInput], Awaitable[GeneratorOutput]] | None = None,
    ) -> Any:
        """What makes the groups of prompts: SkyRL's generator, or our own if that is the one by its name.

        `generate`: that of the trainer, which calls the generator's, if a subclass overrides it.
        """
        from skyrl_train.experiment.algorithm import needs_rollout_logprobs
        from skyrl_train.skyrl.gym_generator import SkyRLGymGenerator
        from skyrl_train.skyrl.interface import GeneratorInterface
        from skyrl_train.skyrl.rollouts import GeneratorInterfaceRollouts, generate_settings

        if not isinstance(generator, GeneratorInterface):
            raise ConfigError(
                f"{type(self).__name__}.get_generator returned {type(generator).__name__}: must be a "
                "GeneratorInterface."
            )
        players = {
            phase: super(BasePPOExp, self).build_generator(running.client, running.environments, evaluation=of_eval)
            for phase, of_eval in (("train", False), ("eval", True))
        }
        if isinstance(generator, SkyRLGymGenerator):
            generator.connect(players)  # type: ignore[arg-type]
            if generator.is_builtin and generate is None:
                return players["eval" if evaluation else "train"]
        needs = needs_rollout_logprobs(self.config.trainer.algorithm)
        settings = generate_settings(self.config, evaluation=evaluation, needs_logprobs=needs)
        return GeneratorInterfaceRollouts(generator, settings, self.tokenizer, generate)

    async def fit(self, session: Session) -> None:
        await self._skyrl_trainer.run()


def _validate_trainer(facade: Any, experiment: Experiment) -> RayPPOTrainer:
    from skyrl_train.skyrl.trainer import RayPPOTrainer

    if not isinstance(facade, RayPPOTrainer):
        raise ConfigError(
            f"{type(experiment).__name__}.get_trainer returned {type(facade).__name__}: must be a RayPPOTrainer; a "
            "loop of another kind is built in Experiment.build_trainer (docs/from_skyrl.md)."
        )
    return facade


def _prompts(dataset: Any, config: Config) -> PromptDataset:
    """A dataset of SkyRL's form, whose items are (messages, env_class, extras, uid), as prompts."""
    from skyrl_train.data.dataset import PromptDataset
    from skyrl_train.data.messages import Prompt

    if isinstance(dataset, PromptDataset):
        prompts = dataset.prompts
        named = [replace(one, env_class=one.env_class or config.environment.env_class) for one in prompts]
        return PromptDataset(tuple(named), dataset.too_long)
    rows = [dataset[index] for index in range(len(dataset))]
    rows = dataset.collate_fn(rows) if hasattr(dataset, "collate_fn") else [_to_dict_row(row) for row in rows]
    made = []
    for index, row in enumerate(rows):
        try:
            extras = dict(row.get("env_extras") or {})
            env_class = row.get("env_class") or config.environment.env_class
            source = str(extras.get("data_source") or "unknown")
            made.append(Prompt(str(row["uid"]), [dict(one) for one in row["prompt"]], env_class, extras, source))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"item {index} of {type(dataset).__name__}: must be (messages, env_class, extras, uid), or a dict of "
                f"prompt, env_class, env_extras and uid, got {row!r:.80}."
            ) from error
    if len({one.uid for one in made}) < len(made):
        raise DataError(f"{type(dataset).__name__}: two items have the same uid; seeds and resuming need one for each.")
    return PromptDataset(tuple(made), 0)


def _to_dict_row(row: Any) -> Any:
    names = ("prompt", "env_class", "env_extras", "uid")
    return dict(zip(names, row, strict=True)) if isinstance(row, tuple) and len(row) == len(names) else row


def _without_overlong_buffer(config: Config) -> Config:
    """SkyRL leaves this penalty to the trainer that changes rewards, which the configuration tells how much it is."""
    return replace_value(config, "trainer.algorithm.overlong_buffer.len", 0)


class _SkyRLTracker:
    """What get_tracker returned, as a Tracker."""

    def __init__(self, own: Any):
        self._own = own

    def begin(self, step: int, total_steps: int) -> None:
        """SkyRL's trackers are not told."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._own.log(dict(metrics), step=step, commit=True)

    def samples(self, rows: Sequence[Any], step: int) -> None:
        """SkyRL's trackers get none."""

    def close(self) -> None:
        if hasattr(self._own, "finish"):
            self._own.finish()
