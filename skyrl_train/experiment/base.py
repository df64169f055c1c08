"""One experiment: every part of a run from a method that a subclass can override, and how it is started and ended.

Recipes that need a part of their own subclass Experiment and pass the class to `run_experiment`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from skyrl_train.cluster.external_cluster import external_cluster_has_gpus, short_job_grace_warning
from skyrl_train.config.locations import is_uri
from skyrl_train.config.predicates import RunComponents, count_run_slots, has_evaluation
from skyrl_train.config.prepare import PreparedConfig, run_entrypoint
from skyrl_train.config.run_folder import run_identity
from skyrl_train.config.schema import Config
from skyrl_train.errors import ClusterLost, RunInterrupted
from skyrl_train.experiment.driver import exit_on_signals, format_failure, relaxed_gc, run_until_signaled
from skyrl_train.experiment.plugins import check_plugins
from skyrl_train.report.progress_log import print_status, startup_phase
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.terminal import print_stderr
from skyrl_train.trainer.run_folder import check_same_run

if TYPE_CHECKING:
    from skyrl_train.data.dataset import PromptDataset
    from skyrl_train.engines.client import EngineClient
    from skyrl_train.environments.pool import EnvironmentPool
    from skyrl_train.experiment.run_resources import RolloutResources
    from skyrl_train.learner.learner import Learner
    from skyrl_train.rollouts.conversation import ConversationGenerator
    from skyrl_train.trainer.trainer import StepSchedule, Trainer

T = TypeVar("T")


class Experiment:
    """One experiment: every part of a run comes from a method that a subclass can override.

    What can be had before anything is started comes from `get_*`, the parts of what is running from `build_*`.
    The functions behind them are in the other modules of this package: `services` starts what a run needs, `trainer`
    makes the loop over it. torch and Ray are imported once the configuration is known good.
    """

    components: ClassVar[RunComponents] = RunComponents()
    """What of a configuration it uses."""

    def __init__(self, config: Config):
        check_plugins(config)
        trainer = config.trainer
        if self.components.learner:
            if (short := short_job_grace_warning()) is not None:
                print_stderr(f"warning: {short}")
            folder = resolve_local_folder(trainer.ckpt_path)
            uploaded = f", uploaded to {trainer.ckpt_path}" if is_uri(trainer.ckpt_path) else ""
            print_status("run", f"{trainer.run_name}, in {folder.absolute()}{uploaded}")
            check_same_run(folder, run_identity(config))
        with startup_phase("checks", "models, tokenizer, a sample of the data, addresses"):
            from skyrl_train.experiment.preflight import check_run

            check_run(config, required_components(type(self)))
        from skyrl_train.cluster.ray_cluster import Cluster, import_in_background  # takes a second

        self.restarts = 0
        """How often the ranks were started again (trainer.restarts)."""
        self.adopt(config)
        processes = count_run_slots(config, self.components).processes
        self.cluster = Cluster(trainer.plugins, num_actors=processes, preload=worker_imports(config, self.components))
        with ExitStack() as stack:
            with (
                startup_phase("Ray", "its processes, and imports meanwhile"),
                import_in_background("skyrl_train.experiment.trainer"),
            ):
                stack.enter_context(self.cluster)
            with startup_phase("data", "tokenizer, rows of data, environments"):
                self.tokenizer = self.get_tokenizer()
                self.train_dataset = self.as_prompts(self.get_train_dataset())
                self.eval_dataset = self.as_prompts(self.get_eval_dataset())
                self.check_environments()
            stack.pop_all()  # connected until `session` or the run ends

    def adopt(self, config: Config) -> None:
        """From now on, this is the configuration: after a restart that of what is left of the cluster."""
        self.config = config

    def get_tokenizer(self) -> Any:
        """The tokenizer of prompts and completions."""
        from skyrl_train.experiment.data import build_tokenizer

        return build_tokenizer(self.config)

    def get_train_dataset(self) -> PromptDataset:
        """The prompts to train on."""
        from skyrl_train.experiment.data import build_prompts

        return build_prompts(self.config, self.tokenizer, self.config.data.train_data, "data.train_data")

    def get_eval_dataset(self) -> PromptDataset | None:
        """The prompts to evaluate on; None without data.val_data or when nothing asks for an evaluation."""
        from skyrl_train.experiment.data import build_prompts

        if not self.config.data.val_data or not has_evaluation(self.config.trainer):
            return None
        return build_prompts(self.config, self.tokenizer, self.config.data.val_data, "data.val_data")

    def as_prompts(self, dataset: Any) -> Any:
        """What `get_train_dataset` or `get_eval_dataset` returned, as a PromptDataset or None."""
        return dataset

    def check_environments(self) -> None:
        """Refuse, before anything is started, environments that cannot do their work here."""
        from skyrl_train.experiment.environments import check_environments

        check_environments(self.config, self.train_dataset, self.eval_dataset)

    def build_tracker(self, directory: Any) -> Any:
        """Where numbers and completions go, besides the JSONL files in `directory`."""
        from skyrl_train.data.control_tokens import find_end_of_turn_name
        from skyrl_train.experiment.run_resources import build_trackers

        end_of_turn = find_end_of_turn_name(self.tokenizer, self.config.generator.chat_template_kwargs)
        return build_trackers(self.config, directory, end_of_turn)

    def build_client(self, engines: Sequence[Any]) -> Any:
        """The client in front of the engines."""
        from skyrl_train.experiment.engines import build_client

        return build_client(engines, self.config.generator, self.config.trainer.timeouts)

    def build_generator(self, client: Any, environments: Any, *, evaluation: bool) -> ConversationGenerator:
        """What turns a prompt into a group of trajectories: an object with `async rollout(prompt, position)`."""
        from skyrl_train.experiment.trainer import build_generator

        return build_generator(self.config, self.tokenizer, client, environments, evaluation=evaluation)

    def build_trainer(self, running: RolloutResources, schedule: StepSchedule | None = None) -> Trainer:
        """The loop over everything that is running; `schedule` is the configuration's if there is no other."""
        from skyrl_train.experiment.trainer import build_trainer

        return build_trainer(
            self.config,
            running,
            tokenizer=self.tokenizer,
            train_generator=self.build_generator(running.client, running.environments, evaluation=False),
            eval_generator=self.build_generator(running.client, running.environments, evaluation=True),
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            schedule=schedule,
        )

    def run(self) -> None:
        """Start everything, train, stop everything."""
        self._run_until_signaled(self._with_restarts(self._run))

    def _with_restarts(self, attempt: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """Make an attempt at the run, and another one if a rank was lost, as often as trainer.restarts allows."""
        from skyrl_train.experiment.restarts import with_restarts

        return with_restarts(attempt, self.config, self.cluster, self._prepare_restart)

    async def _prepare_restart(self, next_config: Config, configured: Config, cause: str) -> Config:
        from skyrl_train.experiment.restarts import shrink_to_cluster

        self.restarts += 1
        print_status(
            "restart", f"RESTART {self.restarts} of the {configured.trainer.restarts} of trainer.restarts: {cause}"
        )
        self.adopt(await shrink_to_cluster(next_config, configured, self.components, self.cluster))
        return self.config

    def _run_until_signaled(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of this experiment. A signal or the death of the cluster ends it in good order."""
        with relaxed_gc():
            return asyncio.run(run_until_signaled(work, self.cluster.wait_until_lost()))

    async def _run(self) -> None:
        from skyrl_train.experiment.restarts import raise_lost_ranks

        async with self.session() as running, raise_lost_ranks(running.learner, self.config.trainer.restarts):
            await self.fit(running)

    async def fit(self, session: Session) -> None:
        """Train to the last step."""
        await session.trainer.fit()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Everything started, the trainer included, which has not begun; on exit all of it is stopped."""
        from skyrl_train.experiment.engines import check_endpoint, run_endpoint
        from skyrl_train.experiment.run_resources import start_rollout_resources

        async with AsyncExitStack() as stack:
            stack.enter_context(self.cluster)
            check_endpoint(self.config)
            running = await stack.enter_async_context(
                start_rollout_resources(
                    self.config,
                    self.cluster,
                    self.components,
                    train_dataset=self.train_dataset,
                    build_tracker=self.build_tracker,
                    build_client=self.build_client,
                )
            )
            await stack.enter_async_context(run_endpoint(self.config, running.client, self.tokenizer))
            trainer = self.build_trainer(running)
            trainer.restarts = self.restarts
            stack.push_async_callback(trainer.close)
            yield Session(
                trainer=trainer,
                learner=trainer.learner,
                client=running.client,
                environments=running.environments,
                tokenizer=self.tokenizer,
                directory=running.base.folder,
            )


@dataclass(frozen=True)
class Session:
    """The parts of a run that has started; they live until the block that made it ends."""

    trainer: Trainer
    """The loop: `await trainer.fit()`; `trainer.step` is the number of finished steps."""
    learner: Learner
    """All ranks of the trained model as one: score, update, save, export."""
    client: EngineClient
    """The inference engines as one: generate, score, health. In turn with the learner: see `generating`."""
    environments: EnvironmentPool
    """The processes that run environments, beside the driver or on nodes of the cluster."""
    tokenizer: Any
    directory: Path
    """The run's folder (trainer.ckpt_path)."""

    def generating(self) -> AbstractAsyncContextManager[None]:
        """While inside, the client answers: engines that are colocated with the learner sleep otherwise."""
        return self.trainer.offload_manager.generating()


def worker_imports(cfg: Config, components: RunComponents) -> list[str]:
    """What ranks and engines import, done before they are made. Packages of engines set up their process first."""
    modules = ["skyrl_train.learner.worker"] if components.learner else []
    if components.engines and cfg.generator.backend == "transformers":
        modules.append("skyrl_train.engines.transformers.engine")
    return modules or ["torch"]


def run_experiment(experiment: type[Experiment], argv: Sequence[str] | None = None) -> None:
    """Check the command line, then run the experiment, for a program of your own.

    What the program registered counts as if `trainer.plugins` had named it, and keys that are added to `generator` and
    `environment` with a plus are its own.
    A person's mistake is printed and exits 2, before torch or Ray start; a run that had to stop says why and exits 1:
    its traceback is in the log of the driver.
    """
    launch_experiment(experiment, argv, has_user_code=True)


def launch_experiment(
    experiment: type[Experiment], argv: Sequence[str] | None = None, *, has_user_code: bool = False
) -> None:
    """What `run_experiment` does; the entrypoints of this package bring no code of the user's."""

    def run(prepared: PreparedConfig) -> None:
        made = experiment(prepared.config)
        with raise_root_cause(made):
            made.run()

    with exit_on_failure():
        components = required_components(experiment)
        run_entrypoint(
            run, argv, has_user_code=has_user_code, components=components, has_accelerator=external_cluster_has_gpus
        )


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """Inside, a program starts a run: what ends it is said on stderr, and decides the status to exit with."""
    try:
        with exit_on_signals():
            yield
    except RunInterrupted as stopped:
        print_stderr(str(stopped))
        sys.exit(128 + stopped.signal)
    except Exception as error:
        print_stderr(format_failure(error))
        sys.exit(1)


@contextmanager
def raise_root_cause(experiment: Experiment) -> Iterator[None]:
    """Inside, an experiment that was made runs; what it raises is what ended it first. On exit it is disconnected."""
    with experiment.cluster:
        try:
            yield
        except Exception as error:
            from skyrl_train.experiment.algorithm import build_policy_objective_spec, build_sft_objective_spec
            from skyrl_train.experiment.memory_tuning import as_out_of_memory

            if isinstance(error, ClusterLost | RunInterrupted):
                raise
            if (death := experiment.cluster.failure()) is not None:
                raise death from error  # what else went wrong follows from it
            learning = build_policy_objective_spec if experiment.components.rewards else build_sft_objective_spec
            if (full := as_out_of_memory(error, experiment.config, learning)) is not None:
                raise full from error
            raise


def required_components(experiment: type[Experiment]) -> RunComponents:
    """What must be there for it: what the class says that names its `uses`, but for files of methods replaced since."""
    named = next(cls for cls in experiment.__mro__ if issubclass(cls, Experiment) and "components" in vars(cls))
    components = experiment.components
    return replace(
        components,
        train_data=components.train_data and experiment.get_train_dataset is named.get_train_dataset,
        val_data=components.val_data and experiment.get_eval_dataset is named.get_eval_dataset,
        tokenizer=components.tokenizer and experiment.get_tokenizer is named.get_tokenizer,
    )
