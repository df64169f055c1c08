"""SkyRL's experiment: its hooks, with SkyRL's signatures, build the parts of a run."""

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
    """An experiment whose parts come from SkyRL's hooks. Subclass it and call `run()`, inside or outside a Ray task.

    `self.config` is the validated configuration, adapted to this machine, with the folders of the run. All parts read
    it. `self.cfg` holds the same values as a DictConfig.

    Overriding a method of SkyRL's experiment that is never called here raises ConfigError when the class is defined.

    Args:
        cfg: The configuration that Hydra composed, or a validated one.

    Raises:
        ConfigError: The configuration is not valid; the message lists every problem.
    """

    components = RunComponents()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_overrides(cls, BasePPOExp, EXPERIMENT_REPLACEMENTS)

    def __init__(self, cfg: DictConfig | Config):
        from skyrl_train.skyrl.registries import load_program_registrations

        load_program_registrations()
        config = to_config(cfg, required_components(type(self)))
        self.set_config(config)
        self.colocate_pg = self.get_colocate_pg()
        super().__init__(config)
        os.makedirs(resolve_local_folder(config.trainer.export_path), exist_ok=True)

    def set_config(self, config: Config) -> None:
        """Use `config` as the experiment's configuration from now on, and set `self.cfg` to it as an OmegaConf
        DictConfig."""
        super().set_config(config)
        self.cfg = to_dictconfig(config)

    # -- hooks -------------------------------------------------------------------------------------------------------

    @staticmethod
    def get_cfg_as_str(dict_cfg: DictConfig) -> str:
        """Return the configuration as YAML."""
        return str(OmegaConf.to_yaml(dict_cfg))

    def get_tokenizer(self, padding_side: str = "left") -> Any:
        """Return the tokenizer of the policy.

        Its padding token is the end-of-sequence token if it has none, because SkyRL's code expects one.
        """
        tokenizer = super().get_tokenizer()
        tokenizer.padding_side = padding_side
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def get_colocate_pg(self, timeout: int | None = None) -> Any:
        """Return None: the run reserves GPUs later, and hooks do not get the placement group. `timeout` is ignored."""
        return None

    def get_generator(self, cfg: DictConfig, tokenizer: Any, inference_engine_client: InferenceEngineClient) -> Any:
        """Return the generator that turns prompts into trajectories. Override this to use another one.

        Args:
            cfg: The configuration of the run.
            tokenizer: The tokenizer of `get_tokenizer`.
            inference_engine_client: The client of the run's engines.

        Returns:
            An instance of GeneratorInterface; anything else raises ConfigError when the run starts.
        """
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
        """Return the trainer. The run calls this with keyword arguments; override it to use a subclass.

        Args:
            cfg: The configuration of the run.
            tracker: The object that `get_tracker` returned, or one that logs with the metrics of the step.
            tokenizer: The tokenizer of `get_tokenizer`.
            train_dataset: The training prompts.
            eval_dataset: The evaluation prompts, or None.
            inference_engine_client: The client of the run's engines.
            generator: The object that `get_generator` returned.
            colocate_pg: The object that `get_colocate_pg` returned: None.

        Returns:
            A RayPPOTrainer; anything else raises ConfigError when the run starts.
        """
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
        """Return a tracker to use in addition to those of `trainer.logger`. Override it; the default returns None.

        The run calls its `log(data, step=..., commit=True)` after every step, and `finish()` at the end if it exists.
        """

    def __getattr__(self, name: str) -> NoReturn:
        raise_unsupported_attribute(type(self).__name__, EXPERIMENT_REPLACEMENTS, name)

    # -- building the run from the hooks -----------------------------------------------------------------------------

    def as_prompts(self, dataset: Any) -> Any:
        return None if dataset is None else _prompts(dataset, self.config)

    def build_tracker(self, directory: Any) -> Any:
        from skyrl_train.report.trackers import Trackers

        configured, self._own_tracker = super().build_tracker(directory), self.get_tracker()
        own = self._own_tracker
        return configured if own is None else Trackers({"run": configured, "get_tracker": _SkyRLTracker(own)})

    def build_trainer(self, running: RolloutResources, schedule: StepSchedule | None = None) -> Trainer:
        from skyrl_train.experiment.trainer import build_trainer
        from skyrl_train.skyrl.client import InferenceEngineClient
        from skyrl_train.skyrl.trainer import StepMetricsTracker

        client = InferenceEngineClient(running.client, self.tokenizer, self.config)
        generator = self.get_generator(self.cfg, self.tokenizer, client)
        skyrl_trainer = self.get_trainer(
            cfg=self.cfg,
            tracker=StepMetricsTracker() if self._own_tracker is None else self._own_tracker,
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=generator,
            colocate_pg=self.colocate_pg,
        )
        self._skyrl_trainer = _validate_trainer(skyrl_trainer, self)
        rollouts = {
            False: self._rollouts(generator, running, False, self._skyrl_trainer.generate_override),
            True: self._rollouts(generator, running, True),
        }
        trainer = build_trainer(
            _without_overlong_buffer(self.config) if skyrl_trainer.overrides_rewards else self.config,
            running,
            tokenizer=self.tokenizer,
            train_generator=rollouts[False],
            eval_generator=rollouts[True],
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            schedule=schedule,
        )
        for group_generator in rollouts.values():
            if hasattr(group_generator, "connect"):
                group_generator.connect(trainer)
        self._skyrl_trainer.connect(trainer)
        return trainer

    def _rollouts(
        self,
        generator: Any,
        running: RolloutResources,
        evaluation: bool,
        generate: Callable[[GeneratorInput], Awaitable[GeneratorOutput]] | None = None,
    ) -> Any:
        """Return an adapter that generates groups with SkyRL's generator, or the built-in generator.

        Args:
            generator: The object that `get_generator` returned.
            running: The engines and environments of the run.
            evaluation: True for evaluation, False for training.
            generate: The trainer's `generate` if a subclass overrides it; it calls the generator's.
        """
        from skyrl_train.experiment.algorithm import needs_rollout_logprobs
        from skyrl_train.skyrl.gym_generator import SkyRLGymGenerator
        from skyrl_train.skyrl.interface import GeneratorInterface
        from skyrl_train.skyrl.rollouts import GeneratorInterfaceRollouts, generate_settings

        if not isinstance(generator, GeneratorInterface):
            raise ConfigError(
                f"{type(self).__name__}.get_generator returned {type(generator).__name__}, which is not a "
                "GeneratorInterface. Subclass skyrl_train.generators.base.GeneratorInterface."
            )
        builtin_generators = {
            phase: super(BasePPOExp, self).build_generator(running.client, running.environments, evaluation=evaluates)
            for phase, evaluates in (("train", False), ("eval", True))
        }
        if isinstance(generator, SkyRLGymGenerator):
            generator.connect(builtin_generators)  # type: ignore[arg-type]
            if generator.is_builtin and generate is None:
                return builtin_generators["eval" if evaluation else "train"]
        needs = needs_rollout_logprobs(self.config.trainer.algorithm)
        settings = generate_settings(self.config, evaluation=evaluation, needs_logprobs=needs)
        return GeneratorInterfaceRollouts(generator, settings, self.tokenizer, generate)

    async def fit(self, session: Session) -> None:
        await self._skyrl_trainer.run()


def _validate_trainer(skyrl_trainer: Any, experiment: Experiment) -> RayPPOTrainer:
    from skyrl_train.skyrl.trainer import RayPPOTrainer

    if not isinstance(skyrl_trainer, RayPPOTrainer):
        raise ConfigError(
            f"{type(experiment).__name__}.get_trainer returned {type(skyrl_trainer).__name__}, which is not a "
            "RayPPOTrainer. To build a training loop of another kind, override Experiment.build_trainer "
            "(docs/guides/from_skyrl.md)."
        )
    return skyrl_trainer


def _prompts(dataset: Any, config: Config) -> PromptDataset:
    """Convert a SkyRL dataset, whose items are (messages, env_class, extras, uid), to prompts."""
    from skyrl_train.data.dataset import PromptDataset
    from skyrl_train.data.messages import Prompt

    if isinstance(dataset, PromptDataset):
        default = config.environment.env_class
        loaded = [replace(prompt, env_class=prompt.env_class or default) for prompt in dataset.prompts]
        return PromptDataset(tuple(loaded), dataset.too_long)
    rows = [dataset[index] for index in range(len(dataset))]
    rows = dataset.collate_fn(rows) if hasattr(dataset, "collate_fn") else [_to_dict_row(row) for row in rows]
    prompts = []
    for index, row in enumerate(rows):
        try:
            extras = dict(row.get("env_extras") or {})
            env_class = row.get("env_class") or config.environment.env_class
            source = str(extras.get("data_source") or "unknown")
            prompts.append(
                Prompt(str(row["uid"]), [dict(message) for message in row["prompt"]], env_class, extras, source)
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"item {index} of {type(dataset).__name__} must be a tuple (messages, env_class, extras, uid), or a "
                f"dict with the keys prompt, env_class, env_extras and uid; got {row!r:.80}."
            ) from error
    if len({prompt.uid for prompt in prompts}) < len(prompts):
        raise DataError(
            f"{type(dataset).__name__}: two items have the same uid. "
            "Seeds and resuming need a different uid for each item."
        )
    return PromptDataset(tuple(prompts), 0)


def _to_dict_row(row: Any) -> Any:
    names = ("prompt", "env_class", "env_extras", "uid")
    return dict(zip(names, row, strict=True)) if isinstance(row, tuple) and len(row) == len(names) else row


def _without_overlong_buffer(config: Config) -> Config:
    """Disable the overlong penalty: in SkyRL, a trainer that overrides rewards applies it itself."""
    return replace_value(config, "trainer.algorithm.overlong_buffer.len", 0)


class _SkyRLTracker:
    """A tracker that forwards to the object that `get_tracker` returned."""

    def __init__(self, own: Any):
        self._own = own

    def begin(self, step: int, total_steps: int) -> None:
        """Do nothing: SkyRL's trackers have no such method."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._own.log(dict(metrics), step=step, commit=True)

    def samples(self, rows: Sequence[Any], step: int) -> None:
        """Do nothing: SkyRL's trackers take no samples."""

    def close(self) -> None:
        if hasattr(self._own, "finish"):
            self._own.finish()
