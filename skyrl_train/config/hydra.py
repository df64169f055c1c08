"""The use of Hydra and OmegaConf: the command-line grammar, composition of YAML presets, and interpolation.

Hydra sees the defaults of the dataclasses as plain mappings. This package can therefore report all wrong keys and types
at once, instead of one at a time by Hydra. Hydra's run folders, log files and `chdir` are turned off.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import io
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import skyrl_train
from skyrl_train.atomic_files import atomic_write_text
from skyrl_train.config.keys import all_keys, canonical_key, canonical_value, key_aliases, value_keys
from skyrl_train.config.problems import Problem, raise_problems
from skyrl_train.config.redaction import redact
from skyrl_train.config.schema import Config
from skyrl_train.config.section import Section, freeze
from skyrl_train.config.skyrl_keys import (
    describe_ignored_skyrl_keys,
    find_skyrl_key,
    find_skyrl_key_problems,
    pop_skyrl_keys,
)
from skyrl_train.config.value_parsing import (
    InvalidValue,
    build_section,
    find_hydra_targets,
    find_value_problems,
    is_interpolation,
    parse_value,
)
from skyrl_train.errors import ConfigError

BASE_PRESET = "ppo_base_config"
SCHEMA_NAME = "skyrl_schema"
CONFIG_FILE = "config.yaml"
"""Name of the file in a run's folder that holds its complete configuration."""


def presets_folder() -> Path:
    """Return the folder of the YAML presets: inside an installed package, or `config/` of a checkout.

    Raises:
        ConfigError: The presets were not found, so the installation is incomplete.
    """
    package = Path(skyrl_train.__file__).resolve().parent
    for folder in (package / "presets", package.parent / "config"):
        if (folder / f"{BASE_PRESET}.yaml").is_file():
            return folder
    raise ConfigError(
        f"{BASE_PRESET}.yaml was not found in {package} or next to it: the installation is incomplete. Reinstall the "
        "package."
    )


def to_dict(section: Section) -> dict[str, Any]:
    """Return a section as nested plain values: dicts for sections and mappings, lists for lists and tuples."""
    return {item.name: _to_plain(getattr(section, item.name)) for item in dataclasses.fields(section)}  # type: ignore[arg-type]


def _to_plain(value: Any) -> Any:
    if isinstance(value, Section):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _to_extensible_config(content: dict[str, Any]) -> DictConfig:
    """Return nested mappings that accept new keys, which Hydra would reject otherwise.

    Aliases of keys must be accepted, and unknown keys are reported later with a suggestion.
    """
    config = OmegaConf.create(
        {key: _to_extensible_config(value) if isinstance(value, dict) else value for key, value in content.items()}
    )
    OmegaConf.set_struct(config, False)
    return config


ConfigStore.instance().store(name=SCHEMA_NAME, node=_to_extensible_config(to_dict(Config())), provider="skyrl_train")


def flag_parser() -> argparse.ArgumentParser:
    """Return a parser of Hydra's flags and of overrides (`key=value`). Hydra offers no public parser."""
    parser = argparse.ArgumentParser(add_help=False, description="Hydra")
    parser.add_argument("overrides", nargs="*", help="key=value")
    for names in ("--help -h", "--hydra-help", "--resolve", "--run -r", "--multirun -m", "--shell-completion -sc"):
        parser.add_argument(*names.split(), action="store_true")
    for names in ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd", "--experimental-rerun"):
        parser.add_argument(*names.split())
    parser.add_argument("--version", action="version", version=f"Hydra {hydra.__version__}")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    topics = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=topics)
    return parser


def parse_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse command-line arguments.

    Returns:
        The values of Hydra's flags by name, and the overrides (`key=value` texts) unparsed.

    Raises:
        SystemExit: A flag is unknown; argparse prints the usage and exits with code 2.
    """
    flags = vars(flag_parser().parse_intermixed_args(list(argv)))
    return flags, flags.pop("overrides")


@dataclass(frozen=True)
class Override:
    """A `key=value` argument of the command line, parsed with Hydra's grammar."""

    text: str
    """The argument as typed."""
    key: str
    """The key without the leading `+`, `++` or `~`."""
    value: Any
    is_delete: bool = False
    """True for `~key`, which deletes a key."""
    is_sweep: bool = False
    """True for several values of a multirun, such as `key=1,2`."""
    error: str = ""
    """Parser error if the argument does not follow the grammar, else empty."""

    @property
    def for_hydra(self) -> str:
        """The override to pass to Hydra. It uses `++`, which sets known and new keys: this package checks the keys."""
        if self.is_delete or self.error or self.key.startswith(("hydra.", "hydra/")):
            return self.text
        key = canonical_key(self.key) if find_skyrl_key(self.key) is None else self.key
        return f"++{key}={self.text.partition('=')[2]}"


def parse_override(text: str) -> Override:
    """Parse one `key=value` argument.

    Mappings and lists may also be written as JSON, whose quoted keys Hydra's grammar does not accept.

    Returns:
        The override. If the text does not follow the grammar, its field `error` is set; nothing is raised.
    """
    key, _, value = text.partition("=")
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        if (container := _parse_json_container(value)) is not None:
            return parse_override(f"{key}={to_override_literal(container)}")
        return Override(text, key.lstrip("+~"), value, error=str(error).strip().splitlines()[0])
    name = parsed.key_or_group if parsed.package is None else f"{parsed.key_or_group}@{parsed.package}"
    is_sweep = parsed.is_sweep_override()
    return Override(text, name, value if is_sweep else parsed.value(), parsed.is_delete(), is_sweep)


def _parse_json_container(text: str) -> Any:
    """Return the mapping or list that a text represents in JSON, or None for any other text."""
    try:
        return json.loads(text) if text.startswith(("{", "[")) else None
    except ValueError:
        return None


def to_override_literal(value: Any) -> str:
    """Return a plain value (mappings, lists, text, numbers, booleans, None) in the grammar of Hydra's overrides."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{to_override_literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(to_override_literal, value))}]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)


def compose(overrides: Sequence[str], name: str | None = None, preset_folder: str | None = None) -> DictConfig:
    """Compose a preset and overrides with Hydra.

    Args:
        overrides: Overrides in Hydra's grammar, as `Override.for_hydra` returns them.
        name: Name of the preset; None is the base preset.
        preset_folder: Folder in which presets are looked for in addition to the package's own; None for only the
            package's own.

    Returns:
        The composed configuration, including Hydra's own section, with unresolved interpolations and unchecked keys.

    Raises:
        ConfigError: The folder or the preset does not exist, or Hydra cannot compose it.
    """
    if preset_folder is not None and not Path(preset_folder).is_dir():
        raise ConfigError(f"--config-dir={preset_folder}: must be a folder that exists.")
    try:
        with _hydra_lock, _hydra_initialized(preset_folder):
            return hydra.compose(name or BASE_PRESET, list(overrides), return_hydra_config=True)
    except RecursionError as error:
        raise ConfigError(
            f"The configuration {name or BASE_PRESET} cannot be composed: presets include each other, or a YAML alias "
            "refers to itself. Remove the cycle."
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        if isinstance(error, MissingConfigException) and preset_folder is not None:
            _raise_if_yml(preset_folder, error.missing_cfg_file or "")
        text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(f"The configuration {name or BASE_PRESET} cannot be composed: {text}") from error


def _raise_if_yml(preset_folder: str, missing: str) -> None:
    """Raise ConfigError if a missing preset exists with the ending .yml."""
    file = os.path.join(preset_folder, missing).removesuffix(".yaml").removesuffix(".yml") + ".yml"
    if os.path.isfile(file):
        raise ConfigError(f"{file}: the name of a preset must end in .yaml. Rename the file.")


class PresetSearchPath(SearchPathPlugin):
    """A Hydra plugin that adds the folder of `--config-dir` to Hydra's search path for presets."""

    folder: ClassVar[str | None] = None
    """The folder; None adds nothing. It is a class variable because Hydra creates the plugin itself."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder to the search path. Hydra calls this method."""
        if self.folder is not None:
            search_path.append("command-line", f"file://{Path(self.folder).resolve()}")


@contextmanager
def _hydra_initialized(preset_folder: str | None) -> Iterator[None]:
    """Initialize Hydra with our presets and those of a folder, and restore the caller's Hydra afterwards."""
    outer, base = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    Plugins.instance().register(PresetSearchPath)
    PresetSearchPath.folder = preset_folder
    try:
        with hydra.initialize_config_dir(str(presets_folder()), JobRuntime.instance().get("name"), version_base="1.3"):
            yield
    finally:
        PresetSearchPath.folder = None
        GlobalHydra.instance().hydra = outer
        VersionBase.instance().version_base = base


_hydra_lock = threading.Lock()
"""Serializes the use of Hydra, whose plugins and state are global to the process."""


def preset_keys(name: str | None, preset_folder: str | None) -> frozenset[str]:
    """Return the keys that a preset file itself sets, without those of the presets that it builds on.

    Args:
        name: Name of the preset; None is the base preset.
        preset_folder: Folder in which the preset is looked for before the package's own presets; None for only the
            package's own.

    Returns:
        Dotted names of keys, with aliases resolved. Empty if there is no such preset.
    """
    for folder in (preset_folder, presets_folder()):
        if folder is not None and (path := preset_file(folder, name)).is_file():
            return frozenset(map(canonical_key, _leaf_keys(yaml.safe_load(path.read_text(encoding="utf-8")))))
    return frozenset()


def preset_file(folder: str | Path, name: str | None) -> Path:
    """Return the path of a preset in a folder. The name may end in .yaml; None is the base preset."""
    return Path(folder, f"{(name or BASE_PRESET).removesuffix('.yaml')}.yaml")


def _leaf_keys(content: Any, prefix: str = "") -> Iterator[str]:
    for key, value in content.items() if isinstance(content, dict) else ():
        yield f"{prefix}{key}"
        yield from _leaf_keys(value, f"{prefix}{key}.")


def non_default_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of nested plain values whose values differ from the defaults, with aliases resolved."""
    defaults = dict(_leaf_values(_defaults().content))
    for key, value in _leaf_values(content):
        if key not in defaults or defaults[key] != value:
            yield canonical_key(key)


def _leaf_values(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaf_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_unresolved_dict(raw: DictConfig) -> dict[str, Any]:
    """Return a Hydra configuration as nested plain values, with interpolations as text."""
    content = OmegaConf.to_container(raw, resolve=False, throw_on_missing=False)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def rename_aliases(content: dict[str, Any]) -> Iterator[Problem]:
    """Replace aliases (see `keys.key_aliases`) with the keys that they stand for, in place.

    Args:
        content: Nested plain values of a configuration.

    Yields:
        A problem for each alias whose key has another value, too. The aliases are only replaced while the caller
        iterates.
    """
    for alias, name in key_aliases().items():
        section, last = _find_section(content, alias)
        if section is None or last not in section:
            continue
        value = section.pop(last)
        target, key = _find_section(content, name, create=True)
        if target is None:  # the user set the section to a value, which is reported as another problem
            continue
        default = all_keys()[name].default
        if target.get(key, default) not in (default, value):
            yield Problem(alias, value, f"the same as {name}={target[key]}", SAME_SETTING_ADVICE)
        target[key] = value
        path = alias.rpartition(".")[0]
        while not section:  # it contained only aliases
            outer, emptied = _find_section(content, path)
            if outer is None:
                break
            outer.pop(emptied)
            section, path = outer, path.rpartition(".")[0]


SAME_SETTING_ADVICE = "These are two names of one setting: set only one of them."


def _find_section(content: dict[str, Any], name: str, create: bool = False) -> tuple[dict[str, Any] | None, str]:
    """Return the mapping that holds a key, and the key's name in it.

    A missing mapping is created with `create`. The mapping is None if it is missing, or if there is another value in
    its place.
    """
    section: Any = content
    *path, last = name.split(".")
    for part in path:
        if create and isinstance(section, dict):
            section.setdefault(part, {})
        section = section.get(part) if isinstance(section, dict) else None
    return (section, last) if isinstance(section, dict) else (None, last)


def replace_value_aliases(content: dict[str, Any]) -> None:
    """Replace value aliases (see `KeyMetadata.value_aliases`) with the values that they stand for, in place."""
    for name, key in value_keys().items():
        section, last = _find_section(content, name) if key.metadata.value_aliases else (None, "")
        if section is not None and last in section:
            section[last] = canonical_value(name, section[last])


def resolve_interpolations(content: dict[str, Any], skip: Sequence[str] = ()) -> tuple[Config, list[Problem]]:
    """Resolve interpolations and convert nested plain values to the dataclasses.

    Args:
        content: Nested plain values that override the defaults. The caller must have removed unknown keys and replaced
            aliases with their keys.
        skip: Keys in which the caller has found problems. They keep their defaults.

    Returns:
        The configuration, not frozen, and the problems: values of a wrong type and interpolations that cannot be
        resolved. Such keys keep their defaults, so that the other keys can still be checked.
    """
    problems: list[Problem] = []
    values = _InterpolatedValues(_merge(_defaults().content, _without_keys(content, skip)))

    def parse_key(key: str, hint: Any, default: Any) -> Any:
        try:
            return parse_value(values.resolved(key), hint)
        except InvalidValue as invalid:
            problems.append(Problem(key, values.resolved(key), invalid.allowed, invalid.advice))
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(Problem(key, values.raw(key), "resolvable", _interpolation_advice(error)))
        try:
            return parse_value(_defaults().resolved(key), hint)
        except (InvalidValue, OmegaConfBaseException):
            return default

    return build_section(Config, parse_key), problems


class _InterpolatedValues:
    """Nested plain values, some of which are interpolations. Only these are resolved by OmegaConf, which is slow."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    @functools.cached_property
    def _config(self) -> DictConfig:
        return OmegaConf.create(self.content)

    def raw(self, key: str) -> Any:
        """Return the value before resolution. If a section of the key is an interpolation, return that."""
        value: Any = self.content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else value
        return value

    def resolved(self, key: str) -> Any:
        """Return the value with interpolations resolved. Raises OmegaConfBaseException or RecursionError."""
        value = self.raw(key)
        if not _has_interpolation(value):
            return copy.deepcopy(value) if isinstance(value, (dict, list)) else value
        value = OmegaConf.select(self._config, key, throw_on_missing=True)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _has_interpolation(value: Any) -> bool:
    """Return True if a plain value contains an interpolation or OmegaConf's marker of a missing value."""
    if isinstance(value, dict):
        return any(map(_has_interpolation, value.values()))
    if isinstance(value, list):
        return any(map(_has_interpolation, value))
    return is_interpolation(value) or value == "???"


def _merge(defaults: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults with the values of `content` in their place, merged mapping by mapping."""
    merged = dict(defaults)
    for name, value in content.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            value = _merge(merged[name], value)
        if value != "???" or name not in merged:  # OmegaConf's marker of a missing value
            merged[name] = value
    return merged


@functools.cache
def _defaults() -> _InterpolatedValues:
    """Return the defaults of all keys, with unresolved interpolations. The cached result must not be changed."""
    return _InterpolatedValues(to_dict(Config()))


def _interpolation_advice(error: Exception) -> str:
    """Return what the user can do about an interpolation that cannot be resolved."""
    reason = str(error).splitlines()[0] if str(error) else "It refers to itself."
    if match := re.search(r"Environment variable '(\w+)' not found", reason):
        return f"The environment variable {match[1]} is not set: export it, or set this key to a value without it."
    return reason


def _without_keys(content: dict[str, Any], skip: Sequence[str], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without_keys(value, skip, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in content.items()
        if f"{prefix}{name}" not in skip
    }


def to_config(raw: DictConfig) -> tuple[Config, list[Problem], list[str]]:
    """Convert a composed configuration to the dataclasses.

    Returns:
        The configuration, not frozen; the problems of keys and types, with which keys keep their defaults; and notes
        about SkyRL's keys that have no effect.
    """
    content = to_unresolved_dict(raw)
    hydra_section = content.pop("hydra", {})
    skyrl_keys = list(pop_skyrl_keys(content))
    problems = [*find_hydra_targets(hydra_section), *rename_aliases(content)]
    replace_value_aliases(content)
    problems += find_value_problems("", content)
    config, value_problems = resolve_interpolations(content, [problem.key for problem in problems])
    problems += [*value_problems, *find_skyrl_key_problems(skyrl_keys, config)]
    return config, problems, list(describe_ignored_skyrl_keys(skyrl_keys))


def load_preset(overrides: Sequence[str] = (), preset: str | None = None) -> Config:
    """Return the frozen configuration of a preset and overrides, without validating it or adapting it to a device.

    Entrypoints use `prepare.prepare_config`, which does both.

    Args:
        overrides: `key=value` texts.
        preset: Name of a preset of the package; None is the base preset.

    Raises:
        ConfigError: The preset does not exist, a key is unknown, or a value has a wrong type.
    """
    config, problems, _ = to_config(compose([parse_override(text).for_hydra for text in overrides], preset))
    raise_problems(problems)
    return freeze(config)


def save_resolved(config: Config, path: Path) -> None:
    """Write a configuration as YAML, atomically and without the values of credential variables.

    `--config-dir FOLDER --config-name NAME` starts a run from the file again. Missing folders are created.

    Args:
        config: The configuration.
        path: The file to write. An existing file is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    text = yaml.safe_dump(
        {"defaults": [BASE_PRESET, "_self_"], **redact(to_dict(config))}, sort_keys=False, allow_unicode=True
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, text)


def print_hydra_info(argv: Sequence[str], overrides: Sequence[str]) -> None:
    """Print the output of Hydra's information flags (`--cfg job`, `--info`, `--hydra-help`, ...).

    Values of credential variables are redacted. `sys.argv` is replaced.

    Args:
        argv: Arguments of the command line, with flags and overrides.
        overrides: Checked overrides in Hydra's grammar, which replace those in `argv`.
    """
    arguments = list(argv)
    flags = [text for text in arguments if text not in set(parse_flags(arguments)[1])]
    sys.argv = [sys.argv[0], *flags, *overrides]
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            hydra.main(version_base="1.3", config_path=str(presets_folder()), config_name=BASE_PRESET)(lambda _: None)()
    finally:
        print(redact(output.getvalue()), end="")
