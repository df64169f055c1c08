"""Checks of the names that users' code registers: after it could register them, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from skyrl_train.config.keys import leaves, value_at
from skyrl_train.config.problems import Problem, raise_all
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import OPEN_TO_PLUGINS, role_problems
from skyrl_train.environments.own_classes import why_not_sent
from skyrl_train.registry import import_plugins, unknown


def check_plugins(cfg: Config) -> None:
    """Import trainer.plugins, and check that every configured name that is not built in was registered.

    Loads torch only for a name that is not built in.

    Raises:
        ConfigError: A module cannot be imported, names are not registered, or a registered algorithm needs a model that
            is not configured.
    """
    import_plugins(cfg.trainer.plugins)
    raise_all([*_unregistered(cfg), *_out_of_reach(cfg, [cfg.environment.env_class]), *role_problems(cfg)])


def check_reachable(cfg: Config, env_classes: Iterable[str]) -> None:
    """Raises ConfigError for environments named by data rows that cannot be sent to environment processes."""
    raise_all(_out_of_reach(cfg, env_classes))


def _out_of_reach(cfg: Config, env_classes: Iterable[str]) -> Iterator[Problem]:
    """Environments and tools of the user's program that cannot be sent to the processes in which they run."""
    if cfg.trainer.plugins:  # environment processes import them too, which may register these names there
        return
    tools = cfg.environment.skyrl_gym.tool_use.tools
    named = (
        ("environment", "environment.env_class", env_classes),
        ("tool", "environment.skyrl_gym.tool_use.tools", tools),
    )
    for kind, key, names in named:
        for name in names:
            if reason := why_not_sent(kind, name):
                advice = f"It runs in processes of its own and cannot be sent there ({reason})."
                yield Problem(key, name, "registered by a module of trainer.plugins", advice)


def _unregistered(cfg: Config) -> Iterator[Problem]:
    return (
        Problem(key, name, "registered by a module of trainer.plugins or by your program", _guess(key, name))
        for key in sorted(OPEN_TO_PLUGINS)
        for name in _names(value_at(cfg, key))
        if name not in _built_in(key) and name not in _REGISTERED[key]()
    )


def _built_in(key: str) -> Collection[str]:
    return leaves()[key].facts.choices or ()


def _names(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else list(value)


def _guess(key: str, name: str) -> str:
    _, _, hint = unknown(key, name, _REGISTERED[key]()).rpartition(". ")
    known = f"Known: {', '.join(_REGISTERED[key]())}."
    return f"{known} {hint}" if hint.startswith("Did you mean") else known


def _of_algorithms(registry: str) -> Callable[[], list[str]]:
    def names() -> list[str]:
        from skyrl_train.algorithms import registry as algorithms

        return list(getattr(algorithms, registry).names())

    return names


def _environments() -> list[str]:
    from skyrl_train.environments.registry import environments

    return environments.names()


def _tools() -> list[str]:
    from skyrl_train.environments.tools.registry import tools

    return tools.names()


def _trackers() -> list[str]:
    from skyrl_train.report.trackers import trackers

    return trackers.names()


_REGISTERED: Mapping[str, Callable[[], list[str]]] = {
    "trainer.algorithm.advantage_estimator": _of_algorithms("advantage_estimators"),
    "trainer.algorithm.policy_loss_type": _of_algorithms("policy_losses"),
    "trainer.algorithm.loss_reduction": _of_algorithms("reductions"),
    "trainer.algorithm.kl_estimator_type": _of_algorithms("kl_estimators"),
    "trainer.algorithm.sft.loss_type": _of_algorithms("sft_losses"),
    "environment.env_class": _environments,
    "environment.skyrl_gym.tool_use.tools": _tools,
    "trainer.logger": _trackers,
}
