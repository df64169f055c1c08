"""The `Experiment` class, which builds, starts and ends a run, and `run_experiment`.

A recipe that needs another version of one part subclasses `Experiment`, overrides the method that builds the part, and
passes the class to `run_experiment`.
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
    from skyrl_train.agents.generator import Generator
    from skyrl_train.data.dataset import PromptDataset
    from skyrl_train.engines.client import EngineClient
    from skyrl_train.environments.pool import EnvironmentPool
    from skyrl_train.experiment.run_resources import RolloutResources
    from skyrl_train.learner.learner import Learner
    from skyrl_train.report.trackers import Trackers
    from skyrl_train.trainer.trainer import StepSchedule, Trainer

T = TypeVar("T")


class Experiment:
    """A run whose parts come from methods that a subclass can override.

    `get_*` methods return what can be loaded before anything is started. `build_*` methods build the parts of a running
    experiment. Their default implementations are in the other modules of this package: `run_resources` starts what a
    run needs, `trainer` builds the loop over it. torch and Ray are imported only after the configuration has passed its
    checks.
    """

    components: ClassVar[RunComponents] = RunComponents()
    """The parts of a configuration that this experiment uses."""

    def __init__(self, config: Config):
        check_plugins(config)
        trainer = config.trainer
        if self.components.learner:
            if (warning := short_job_grace_warning()) is not None:
                print_stderr(f"warning: {warning}")
            folder = resolve_local_folder(trainer.ckpt_path)
            uploaded = f", uploaded to {trainer.ckpt_path}" if is_uri(trainer.ckpt_path) else ""
            print_status("run", f"{trainer.run_name}, in {folder.absolute()}{uploaded}")
            check_same_run(folder, run_identity(config))
        with startup_phase("checks", "checking models, tokenizer, a sample of the data, storage and ports"):
            from skyrl_train.experiment.preflight import check_run

            check_run(config, required_components(type(self)))
        from skyrl_train.cluster.ray_cluster import Cluster, import_in_background  # takes a second

        self.restarts = 0
        """Number of times that the ranks have been started again (trainer.restarts)."""
        self.set_config(config)
        processes = count_run_slots(config, self.components).processes
        self.cluster = Cluster(trainer.plugins, num_actors=processes, preload=worker_imports(config, self.components))
        with ExitStack() as stack:
            with (
                startup_phase("Ray", "starting Ray and importing modules"),
                import_in_background("skyrl_train.experiment.trainer"),
            ):
                stack.enter_context(self.cluster)
            with startup_phase("data", "loading the tokenizer and the data, checking environments"):
                self.tokenizer = self.get_tokenizer()
                self.train_dataset = self.as_prompts(self.get_train_dataset())
                self.eval_dataset = self.as_prompts(self.get_eval_dataset())
                self._check_eval_data_sources()
                self.check_environments()
            stack.pop_all()  # the cluster stays connected until `session` or the run ends

    def set_config(self, config: Config) -> None:
        """Use this configuration from now on. After a restart it is the configuration scaled down to the remaining
        nodes.
        """
        self.config = config

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of prompts and completions: that of the policy's model. Override it to use another one.

        Raises:
            ConfigError: The model has no tokenizer, or it or the configured chat template cannot be loaded.
        """
        from skyrl_train.experiment.data import build_tokenizer

        return build_tokenizer(self.config)

    def get_train_dataset(self) -> PromptDataset:
        """Return the prompts to train on, from data.train_data. Override it to use other ones.

        Raises:
            DataError: The data cannot be read, has unusable rows, or has no prompt that is short enough.
        """
        from skyrl_train.experiment.data import build_prompts

        return build_prompts(self.config, self.tokenizer, self.config.data.train_data, "data.train_data")

    def get_eval_dataset(self) -> PromptDataset | None:
        """Return the prompts to evaluate on, from data.val_data. Override it to use other ones.

        None if data.val_data is empty or no evaluation is configured.

        Raises:
            DataError: The data cannot be read, has unusable rows, or has no prompt that is short enough.
        """
        from skyrl_train.experiment.data import build_prompts

        if not self.config.data.val_data or not has_evaluation(self.config.trainer):
            return None
        return build_prompts(self.config, self.tokenizer, self.config.data.val_data, "data.val_data")

    def as_prompts(self, dataset: Any) -> Any:
        """Convert the result of `get_train_dataset` or `get_eval_dataset` to a PromptDataset or None."""
        return dataset

    def _check_eval_data_sources(self) -> None:
        from skyrl_train.experiment.data import check_eval_data_sources

        check_eval_data_sources(self.config, self.eval_dataset)

    def check_environments(self) -> None:
        """Check, before anything is started, that the environments of all rows can run and accept their rows.

        Raises:
            ConfigError: An environment cannot run on this machine.
            DataError: An environment cannot use a row.
        """
        from skyrl_train.experiment.environments import check_environments

        check_environments(self.config, self.train_dataset, self.eval_dataset)

    def build_tracker(self, directory: Path) -> Trackers:
        """Return the trackers of metrics and samples, including the JSONL files in `directory`."""
        from skyrl_train.data.control_tokens import find_end_of_turn_name
        from skyrl_train.experiment.run_resources import build_trackers

        end_of_turn = find_end_of_turn_name(self.tokenizer, self.config.generator.chat_template_kwargs)
        return build_trackers(self.config, directory, end_of_turn)

    def build_client(self, engines: Sequence[Any]) -> EngineClient:
        """Return the client that routes requests to the engines."""
        from skyrl_train.experiment.engines import build_client

        return build_client(engines, self.config.generator, self.config.trainer.timeouts)

    def build_generator(self, client: EngineClient, environments: EnvironmentPool, *, evaluation: bool) -> Generator:
        """Return the generator that turns a prompt into a group of trajectories.

        The result must have the method `async rollout(prompt, position)`.

        Args:
            client: The client of the engines.
            environments: The pool of environment processes.
            evaluation: True for the rollouts of evaluations, False for those of training.
        """
        from skyrl_train.experiment.trainer import build_generator

        return build_generator(self.config, self.tokenizer, client, environments, evaluation=evaluation)

    def build_trainer(self, running: RolloutResources, schedule: StepSchedule | None = None) -> Trainer:
        """Build the trainer of a run from the started engines, environments and learner. It does not start training.

        Args:
            running: The started engines, environments and learner.
            schedule: The number of prompts, epochs and steps, and the division of epochs into steps; None for what the
                configuration and the dataset give.
        """
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
        """Start the run, train to the last step and stop everything. Blocks until the run has ended.

        A signal or the loss of the cluster cancels the run, closes its parts and raises RunInterrupted or ClusterLost.
        """
        self._run_until_signaled(self._with_restarts(self._run))

    def _with_restarts(self, attempt: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """Return a coroutine that runs `attempt`, and runs it again after a lost rank up to trainer.restarts times."""
        from skyrl_train.experiment.restarts import with_restarts

        return with_restarts(attempt, self.config, self.cluster, self._prepare_restart)

    async def _prepare_restart(self, next_config: Config, configured: Config, cause: str) -> Config:
        from skyrl_train.experiment.restarts import shrink_to_cluster

        self.restarts += 1
        print_status("restart", f"RESTART {self.restarts} of {configured.trainer.restarts} (trainer.restarts): {cause}")
        self.set_config(await shrink_to_cluster(next_config, configured, self.components, self.cluster))
        return self.config

    def _run_until_signaled(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of this experiment. A signal or the loss of the cluster cancels it and closes its parts."""
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
        """Start everything, yield the parts, and stop everything on exit.

        The trainer of the session is built but has not begun to train.

        Raises:
            ConfigError: The address of the HTTP endpoint cannot be used, or an engine does not support a configured
                setting.
        """
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
    """The parts of a started run. They are closed when the `async with` block of `Experiment.session` ends."""

    trainer: Trainer
    """The training loop: `await trainer.fit()` runs it, `trainer.step` is the number of finished steps."""
    learner: Learner
    """All ranks of the trained model behind one object: compute log-probs, update, save, export."""
    client: EngineClient
    """All inference engines behind one object: generate, score, health. Colocated engines may sleep while the
    learner works; use `generating`."""
    environments: EnvironmentPool
    """The processes that run environments, next to the driver or on nodes of the cluster."""
    tokenizer: Any
    directory: Path
    """The run's folder (trainer.ckpt_path)."""

    def generating(self) -> AbstractAsyncContextManager[None]:
        """Return an async context manager that keeps the engines awake.

        Engines that are colocated with the learner may sleep outside of this context.
        """
        return self.trainer.offload_manager.generating()


def worker_imports(cfg: Config, components: RunComponents) -> list[str]:
    """Return the modules that Ray's workers import before ranks and engines are created in them.

    vLLM and SGLang are left out because they must configure their process before they are imported.
    """
    modules = ["skyrl_train.learner.worker"] if components.learner else []
    if components.engines and cfg.generator.backend == "transformers":
        modules.append("skyrl_train.engines.transformers.engine")
    return modules or ["torch"]


def run_experiment(experiment: type[Experiment], argv: Sequence[str] | None = None) -> None:
    """Check the command line and run the experiment. This is the entry point of a user's own program.

    Names that the program registered count as if `trainer.plugins` had named the program. Keys that the command line
    adds to `generator` and `environment` with a plus sign are the program's own.

    Args:
        experiment: The class of the experiment.
        argv: The arguments, `key=value` and flags; None for those of the process.

    Raises:
        SystemExit: With 2 for a ConfigError; most are found before torch or Ray start. With 1 if the run failed; the
            traceback is in the driver's log. With 128 + the signal's number after a signal.
    """
    launch_experiment(experiment, argv, has_user_code=True)


def launch_experiment(
    experiment: type[Experiment], argv: Sequence[str] | None = None, *, has_user_code: bool = False
) -> None:
    """Run an experiment as `run_experiment` does, by default without user code.

    Args:
        experiment: The class of the experiment.
        argv: The arguments; None for those of the process.
        has_user_code: True if the program may have registered names and may read keys of its own.

    Raises:
        SystemExit: As in `run_experiment`.
    """

    def run(prepared: PreparedConfig) -> None:
        created = experiment(prepared.config)
        with raise_root_cause(created):
            created.run()

    with exit_on_failure():
        components = required_components(experiment)
        run_entrypoint(
            run, argv, has_user_code=has_user_code, components=components, has_accelerator=external_cluster_has_gpus
        )


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """Print the failure of a run to stderr and exit with the matching status.

    Raises:
        SystemExit: With 128 + the signal's number after a signal, with 1 after any other exception.
    """
    try:
        with exit_on_signals():
            yield
    except RunInterrupted as interruption:
        print_stderr(str(interruption))
        sys.exit(128 + interruption.signal)
    except Exception as error:
        print_stderr(format_failure(error))
        sys.exit(1)


@contextmanager
def raise_root_cause(experiment: Experiment) -> Iterator[None]:
    """Keep the cluster connected while an experiment runs, and raise the failure that caused the others.

    Raises:
        ClusterLost: Ray's own processes died. Other errors of the run are its cause.
        OutOfMemory: A GPU or the host ran out of memory; the message suggests settings.
    """
    with experiment.cluster:
        try:
            yield
        except Exception as error:
            from skyrl_train.experiment.algorithm import build_policy_objective_spec, build_sft_objective_spec
            from skyrl_train.experiment.memory_tuning import as_out_of_memory

            if isinstance(error, ClusterLost | RunInterrupted):
                raise
            if (death := experiment.cluster.failure()) is not None:
                raise death from error  # every other error follows from the lost cluster
            build_objective_spec = (
                build_policy_objective_spec if experiment.components.rewards else build_sft_objective_spec
            )
            if (out_of_memory := as_out_of_memory(error, experiment.config, build_objective_spec)) is not None:
                raise out_of_memory from error
            raise


def required_components(experiment: type[Experiment]) -> RunComponents:
    """Return the components that an experiment class requires.

    Starts from `components` of the class that defines it. Data and tokenizer are not required if a subclass overrides
    the method that loads them (`get_train_dataset`, `get_eval_dataset`, `get_tokenizer`).
    """
    defining_class = next(
        cls for cls in experiment.__mro__ if issubclass(cls, Experiment) and "components" in vars(cls)
    )
    components = experiment.components
    return replace(
        components,
        train_data=components.train_data and experiment.get_train_dataset is defining_class.get_train_dataset,
        val_data=components.val_data and experiment.get_eval_dataset is defining_class.get_eval_dataset,
        tokenizer=components.tokenizer and experiment.get_tokenizer is defining_class.get_tokenizer,
    )
