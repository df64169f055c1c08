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

from skyrl_train.cluster.named import named_cluster_has_gpus, short_grace
from skyrl_train.config.predicates import Uses, evaluates, slots_of
from skyrl_train.config.prepare import PreparedConfig, launch
from skyrl_train.config.run_folder import identity
from skyrl_train.config.schema import Config
from skyrl_train.config.sources import is_address
from skyrl_train.errors import ClusterLost, Stopped
from skyrl_train.experiment.driver import account_of, collecting_seldom, signals_leave, until_told
from skyrl_train.experiment.plugins import check_plugins
from skyrl_train.messages import to_stderr
from skyrl_train.report.phases import phase, say
from skyrl_train.storage.places import working_folder
from skyrl_train.trainer.run_directory import refuse_other_run

if TYPE_CHECKING:
    from skyrl_train.data.dataset import PromptDataset
    from skyrl_train.engines.client import EngineClient
    from skyrl_train.environments.pool import EnvironmentPool
    from skyrl_train.experiment.services import RunningServices
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

    uses: ClassVar[Uses] = Uses()
    """What of a configuration it uses."""

    def __init__(self, config: Config):
        check_plugins(config)
        trainer = config.trainer
        if self.uses.learner:
            if (short := short_grace()) is not None:
                to_stderr(f"warning: {short}")
            folder = working_folder(trainer.ckpt_path)
            uploaded = f", uploaded to {trainer.ckpt_path}" if is_address(trainer.ckpt_path) else ""
            say("run", f"{trainer.run_name}, in {folder.absolute()}{uploaded}")
            refuse_other_run(folder, identity(config))
        with phase("checks", "models, tokenizer, a sample of the data, addresses"):
            from skyrl_train.experiment.preflight import check_run

            check_run(config, used_by(type(self)))
        from skyrl_train.cluster.runtime import Cluster, importing  # takes a second

        self.restarts = 0
        """How often the ranks were started again (trainer.restarts)."""
        self.adopt(config)
        processes = slots_of(config, self.uses).processes
        self.cluster = Cluster(trainer.plugins, workers=processes, preload=imports_of_workers(config, self.uses))
        with ExitStack() as stack:
            with phase("Ray", "its processes, and imports meanwhile"), importing("skyrl_train.experiment.trainer"):
                stack.enter_context(self.cluster)
            with phase("data", "tokenizer, rows of data, environments"):
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

        if not self.config.data.val_data or not evaluates(self.config.trainer):
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
        from skyrl_train.data.control_tokens import end_of_turn_name
        from skyrl_train.experiment.services import build_trackers

        end_of_turn = end_of_turn_name(self.tokenizer, self.config.generator.chat_template_kwargs)
        return build_trackers(self.config, directory, end_of_turn)

    def build_client(self, engines: Sequence[Any]) -> Any:
        """The client in front of the engines."""
        from skyrl_train.experiment.engines import build_client

        return build_client(engines, self.config.generator, self.config.trainer.timeouts)

    def build_generator(self, client: Any, environments: Any, *, evaluation: bool) -> ConversationGenerator:
        """What turns a prompt into a group of trajectories: an object with `async rollout(prompt, position)`."""
        from skyrl_train.experiment.trainer import build_generator

        return build_generator(self.config, self.tokenizer, client, environments, evaluation=evaluation)

    def build_trainer(self, running: RunningServices, schedule: StepSchedule | None = None) -> Trainer:
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
        self._until_told(self._with_restarts(self._run))

    def _with_restarts(self, attempt: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """Make an attempt at the run, and another one if a rank was lost, as often as trainer.restarts allows."""
        from skyrl_train.experiment.restarts import with_restarts

        return with_restarts(attempt, self.config, self.cluster, self._start_over)

    async def _start_over(self, goes_on: Config, configured: Config, cause: str) -> Config:
        from skyrl_train.experiment.restarts import fit_to_what_is_left

        self.restarts += 1
        say("restart", f"RESTART {self.restarts} of the {configured.trainer.restarts} of trainer.restarts: {cause}")
        self.adopt(await fit_to_what_is_left(goes_on, configured, self.uses, self.cluster))
        return self.config

    def _until_told(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of this experiment. A signal or the death of the cluster ends it in good order."""
        with collecting_seldom():
            return asyncio.run(until_told(work, self.cluster.lost()))

    async def _run(self) -> None:
        from skyrl_train.experiment.restarts import rank_losses

        async with self.session() as running, rank_losses(running.learner, self.config.trainer.restarts):
            await self.fit(running)

    async def fit(self, session: Session) -> None:
        """Train to the last step."""
        await session.trainer.fit()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Everything started, the trainer included, which has not begun; on exit all of it is stopped."""
        from skyrl_train.experiment.engines import check_endpoint, endpoint_of_run
        from skyrl_train.experiment.services import services

        async with AsyncExitStack() as stack:
            stack.enter_context(self.cluster)
            check_endpoint(self.config)
            running = await stack.enter_async_context(
                services(
                    self.config,
                    self.cluster,
                    self.uses,
                    train_dataset=self.train_dataset,
                    build_tracker=self.build_tracker,
                    build_client=self.build_client,
                )
            )
            await stack.enter_async_context(endpoint_of_run(self.config, running.client, self.tokenizer))
            trainer = self.build_trainer(running)
            trainer.restarts = self.restarts
            stack.push_async_callback(trainer.close)
            yield Session(
                trainer=trainer,
                learner=trainer.learner,
                client=running.client,
                environments=running.environments,
                tokenizer=self.tokenizer,
                directory=running.base.directory,
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
        return self.trainer.residency.generating()


def imports_of_workers(cfg: Config, uses: Uses) -> list[str]:
    """What ranks and engines import, done before they are made. Packages of engines set up their process first."""
    modules = ["skyrl_train.learner.worker"] if uses.learner else []
    if uses.engines and cfg.generator.backend == "transformers":
        modules.append("skyrl_train.engines.transformers.engine")
    return modules or ["torch"]


def run_experiment(experiment: type[Experiment], argv: Sequence[str] | None = None) -> None:
    """Check the command line, then run the experiment, for a program of your own.

    What the program registered counts as if `trainer.plugins` had named it, and keys that are added to `generator` and
    `environment` with a plus are its own.
    A person's mistake is printed and exits 2, before torch or Ray start; a run that had to stop says why and exits 1:
    its traceback is in the log of the driver.
    """
    start(experiment, argv, own_code=True)


def start(experiment: type[Experiment], argv: Sequence[str] | None = None, *, own_code: bool = False) -> None:
    """What `run_experiment` does; the entrypoints of this package bring no code of the user's."""

    def run(prepared: PreparedConfig) -> None:
        made = experiment(prepared.config)
        with explained(made):
            made.run()

    with accounted():
        uses = used_by(experiment)
        launch(run, argv, own_code=own_code, uses=uses, has_accelerator=named_cluster_has_gpus)


@contextmanager
def accounted() -> Iterator[None]:
    """Inside, a program starts a run: what ends it is said on stderr, and decides the status to exit with."""
    try:
        with signals_leave():
            yield
    except Stopped as stopped:
        to_stderr(str(stopped))
        sys.exit(128 + stopped.signal)
    except Exception as error:
        to_stderr(account_of(error))
        sys.exit(1)


@contextmanager
def explained(experiment: Experiment) -> Iterator[None]:
    """Inside, an experiment that was made runs; what it raises is what ended it first. On exit it is disconnected."""
    with experiment.cluster:
        try:
            yield
        except Exception as error:
            from skyrl_train.experiment.algorithm import policy_learning, sft_learning
            from skyrl_train.experiment.memory_fit import out_of_memory

            if isinstance(error, ClusterLost | Stopped):
                raise
            if (death := experiment.cluster.death()) is not None:
                raise death from error  # what else went wrong follows from it
            learning = policy_learning if experiment.uses.rewards else sft_learning
            if (full := out_of_memory(error, experiment.config, learning)) is not None:
                raise full from error
            raise


def used_by(experiment: type[Experiment]) -> Uses:
    """What must be there for it: what the class says that names its `uses`, but for files of methods replaced since."""
    named = next(cls for cls in experiment.__mro__ if issubclass(cls, Experiment) and "uses" in vars(cls))
    uses = experiment.uses
    return replace(
        uses,
        train_data=uses.train_data and experiment.get_train_dataset is named.get_train_dataset,
        val_data=uses.val_data and experiment.get_eval_dataset is named.get_eval_dataset,
        tokenizer=uses.tokenizer and experiment.get_tokenizer is named.get_tokenizer,
    )
