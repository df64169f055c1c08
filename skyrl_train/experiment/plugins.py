"""Checks of names that user code registers, after plugins were imported and before anything is started."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from skyrl_train.config.keys import get_value, value_keys
from skyrl_train.config.problems import Problem, raise_problems
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import PLUGIN_KEYS, find_role_problems
from skyrl_train.environments.user_registrations import serialization_problem
from skyrl_train.registry import import_plugins, load_object, unknown_name_message

REGISTRIES = {
    "trainer.algorithm.advantage_estimator": "skyrl_train.algorithms.registry:advantage_estimators",
    "trainer.algorithm.policy_loss_type": "skyrl_train.algorithms.registry:policy_losses",
    "trainer.algorithm.loss_reduction": "skyrl_train.algorithms.registry:reductions",
    "trainer.algorithm.kl_estimator_type": "skyrl_train.algorithms.registry:kl_estimators",
    "trainer.algorithm.sft.loss_type": "skyrl_train.algorithms.registry:sft_losses",
    "environment.env_class": "skyrl_train.environments.registry:environments",
    "environment.skyrl_gym.tool_use.tools": "skyrl_train.environments.tools.registry:tools",
    "trainer.logger": "skyrl_train.report.trackers:trackers",
}
"""Key -> the registry of its names. The registry is loaded when a name is not built in."""


def check_plugins(cfg: Config) -> None:
    """Import trainer.plugins and check that every configured name that is not built in is registered.

    Imports torch only for a name that is not built in.

    Raises:
        ConfigError: A module cannot be imported, names are not registered, an environment or tool cannot be sent to its
            processes, or a registered algorithm needs a model that is not configured.
    """
    import_plugins(cfg.trainer.plugins)
    raise_problems([*_unregistered(cfg), *_unpicklable(cfg, [cfg.environment.env_class]), *find_role_problems(cfg)])


def check_environments_picklable(cfg: Config, env_classes: Iterable[str]) -> None:
    """Raise ConfigError if an environment that data rows name cannot be sent to environment processes."""
    raise_problems(_unpicklable(cfg, env_classes))


def _unpicklable(cfg: Config, env_classes: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each environment and tool of the user's program that cannot be sent to its processes."""
    if cfg.trainer.plugins:  # environment processes import the plugins, which may register these names there
        return
    tools = cfg.environment.skyrl_gym.tool_use.tools
    named = (
        ("environment", "environment.env_class", env_classes),
        ("tool", "environment.skyrl_gym.tool_use.tools", tools),
    )
    for kind, key, names in named:
        for name in names:
            if reason := serialization_problem(kind, name):
                advice = f"It runs in separate processes and cannot be sent to them ({reason})."
                yield Problem(key, name, "registered by a module of trainer.plugins", advice)


def names_of_user_code(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield every key and configured name that is not built in, so that user code must register it."""
    for key in sorted(PLUGIN_KEYS):
        value = get_value(cfg, key)
        built_in: Collection[str] = value_keys()[key].metadata.choices or ()
        for name in [value] if isinstance(value, str) else value:
            if name not in built_in:
                yield key, name


def _unregistered(cfg: Config) -> Iterator[Problem]:
    for key, name in names_of_user_code(cfg):
        known = load_object(REGISTRIES[key]).names()
        if name not in known:
            advice = f"Known: {', '.join(known)}."
            _, _, hint = unknown_name_message(key, name, known).rpartition(". ")
            if hint.startswith("Did you mean"):
                advice += f" {hint}"
            yield Problem(key, name, "registered by a module of trainer.plugins or by your program", advice)
