"""All that is used of Hydra and OmegaConf: the command-line grammar, composing YAML, and interpolation.

Hydra sees the defaults of the dataclasses as plain mappings, so that every wrong key and type can be reported at once
by this package instead of one at a time by Hydra. Its run folders, log files and `chdir` are off.
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
"""In a run's folder: its configuration, whole."""


def presets_folder() -> Path:
    """The folder of the YAML presets: inside the package when installed, `config/` next to it in a checkout."""
    package = Path(skyrl_train.__file__).resolve().parent
    for folder in (package / "presets", package.parent / "config"):
        if (folder / f"{BASE_PRESET}.yaml").is_file():
            return folder
    raise ConfigError(
        f"{BASE_PRESET}.yaml was not found next to {package}: the installation is incomplete; reinstall it."
    )


def to_dict(section: Section) -> dict[str, Any]:
    """A section as nested plain values (lists, not tuples)."""
    return {item.name: _to_plain(getattr(section, item.name)) for item in dataclasses.fields(section)}  # type: ignore[arg-type]


def _to_plain(value: Any) -> Any:
    if isinstance(value, Section):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _open(content: dict[str, Any]) -> DictConfig:
    """Nested mappings to which every key may be added: other names of keys, and misspelt ones, which are then refused
    with what was meant. Hydra allows neither unless a section says so."""
    made = OmegaConf.create({key: _open(one) if isinstance(one, dict) else one for key, one in content.items()})
    OmegaConf.set_struct(made, False)
    return made


ConfigStore.instance().store(name=SCHEMA_NAME, node=_open(to_dict(Config())), provider="skyrl_train")


def flag_parser() -> argparse.ArgumentParser:
    """Return a parser of Hydra's flags and of overrides (`key=value`). Hydra has no public one."""
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
    """Return Hydra's flags by name, and the overrides. Exits with 2 on an unknown flag, as argparse does."""
    flags = vars(flag_parser().parse_intermixed_args(list(argv)))
    return flags, flags.pop("overrides")


@dataclass(frozen=True)
class Override:
    """One `key=value` of the command line as Hydra's grammar reads it."""

    text: str
    key: str
    value: Any
    is_delete: bool = False
    is_sweep: bool = False
    error: str = ""
    """Why the grammar refused it."""

    @property
    def for_hydra(self) -> str:
        """The text that sets the key whether or not Hydra has it already: keys are checked by this package."""
        if self.is_delete or self.error or self.key.startswith(("hydra.", "hydra/")):
            return self.text
        key = canonical_key(self.key) if find_skyrl_key(self.key) is None else self.key
        return f"++{key}={self.text.partition('=')[2]}"


def parse_override(text: str) -> Override:
    """Read one override. Never raises: a text that Hydra's grammar refuses comes back with `error`.

    Mappings and lists may also be written as JSON, whose quoted keys that grammar refuses.
    """
    key, _, value = text.partition("=")
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        if (found := _json(value)) is not None:
            return parse_override(f"{key}={to_override_literal(found)}")
        return Override(text, key.lstrip("+~"), value, error=str(error).strip().splitlines()[0])
    name = parsed.key_or_group if parsed.package is None else f"{parsed.key_or_group}@{parsed.package}"
    is_sweep = parsed.is_sweep_override()
    return Override(text, name, value if is_sweep else parsed.value(), parsed.is_delete(), is_sweep)


def _json(text: str) -> Any:
    """The mapping or list that a text is as JSON; None for any other text."""
    try:
        return json.loads(text) if text.startswith(("{", "[")) else None
    except ValueError:
        return None


def to_override_literal(value: Any) -> str:
    """Return a plain value as Hydra's grammar has it."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{to_override_literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(to_override_literal, value))}]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)


def compose(overrides: Sequence[str], name: str | None = None, preset_folder: str | None = None) -> DictConfig:
    """The raw configuration, interpolations unresolved. Raises ConfigError for what Hydra cannot compose."""
    if preset_folder is not None and not Path(preset_folder).is_dir():
        raise ConfigError(f"--config-dir={preset_folder}: must be a folder that exists.")
    try:
        with _composing, _own_hydra(preset_folder):
            return hydra.compose(name or BASE_PRESET, list(overrides), return_hydra_config=True)
    except RecursionError as error:
        raise ConfigError(
            f"The configuration {name or BASE_PRESET} cannot be composed: presets include each other, or a YAML alias refers "
            "to itself."
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        if isinstance(error, MissingConfigException) and preset_folder is not None:
            _refuse_yml(preset_folder, error.missing_cfg_file or "")
        text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(f"The configuration {name or BASE_PRESET} cannot be composed: {text}") from error


def _refuse_yml(preset_folder: str, missing: str) -> None:
    """Raise ConfigError if the preset that was not found, or one that it builds on, is a .yml."""
    file = os.path.join(preset_folder, missing).removesuffix(".yaml").removesuffix(".yml") + ".yml"
    if os.path.isfile(file):
        raise ConfigError(f"{file}: presets end in .yaml; rename it.")


class PresetSearchPath(SearchPathPlugin):
    """A Hydra plugin that adds the folder of `--config-dir` to those in which Hydra looks for presets."""

    folder: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder is not None:
            search_path.append("command-line", f"file://{Path(self.folder).resolve()}")


@contextmanager
def _own_hydra(preset_folder: str | None) -> Iterator[None]:
    """Set Hydra up over our presets and those of `directory`, and restore the caller's Hydra afterwards."""
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


_composing = threading.Lock()
"""Hydra keeps its plugins, and what it composes with, in one place of the process."""


def preset_keys(name: str | None, preset_folder: str | None) -> frozenset[str]:
    """Keys that are written in a preset itself, not in those that it builds on."""
    for folder in (preset_folder, presets_folder()):
        if folder is not None and (path := preset_file(folder, name)).is_file():
            return frozenset(map(canonical_key, _leaf_keys(yaml.safe_load(path.read_text(encoding="utf-8")))))
    return frozenset()


def preset_file(folder: str | Path, name: str | None) -> Path:
    """Return the file in `folder` that `--config-name` names."""
    return Path(folder, f"{(name or BASE_PRESET).removesuffix('.yaml')}.yaml")


def _leaf_keys(content: Any, prefix: str = "") -> Iterator[str]:
    for key, value in content.items() if isinstance(content, dict) else ():
        yield f"{prefix}{key}"
        yield from _leaf_keys(value, f"{prefix}{key}.")


def non_default_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """The keys of nested plain values that are not as they are by default."""
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
    """Nested plain values with interpolations as text."""
    content = OmegaConf.to_container(raw, resolve=False, throw_on_missing=False)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def rename_aliases(content: dict[str, Any]) -> Iterator[Problem]:
    """Move values under other names (see keys.aliases) to the keys themselves, in place."""
    for alias, name in key_aliases().items():
        section, last = _section_of(content, alias)
        if section is None or last not in section:
            continue
        value = section.pop(last)
        home, key = _section_of(content, name, make=True)
        if home is None:  # what the user wrote in the place of the section is a problem of its own
            continue
        default = all_keys()[name].default
        if home.get(key, default) not in (default, value):
            yield Problem(alias, value, f"the same as {name}={home[key]}", "They are one setting: give one.")
        home[key] = value
        if not section:  # it has only other names of keys
            outer, emptied = _section_of(content, alias.rpartition(".")[0])
            if outer is not None:
                outer.pop(emptied)


def _section_of(content: dict[str, Any], name: str, make: bool = False) -> tuple[dict[str, Any] | None, str]:
    """The mapping that holds a key, and the key's name in it. A missing mapping is None, or made with `make`."""
    section: Any = content
    *path, last = name.split(".")
    for part in path:
        if make and isinstance(section, dict):
            section.setdefault(part, {})
        section = section.get(part) if isinstance(section, dict) else None
    return (section, last) if isinstance(section, dict) else (None, last)


def replace_value_aliases(content: dict[str, Any]) -> None:
    """Replace other spellings (see fields.Facts) by the values that they mean, in place."""
    for name, key in value_keys().items():
        section, last = _section_of(content, name) if key.metadata.spellings else (None, "")
        if section is not None and last in section:
            section[last] = canonical_value(name, section[last])


def resolve_interpolations(content: dict[str, Any], skip: Sequence[str] = ()) -> tuple[Config, list[Problem]]:
    """The dataclasses, interpolations resolved. Keys in `skip` and values that are problems keep their defaults.

    So one mistake does not hide the next: the rest can still be checked.
    """
    problems: list[Problem] = []
    values = _InterpolatedValues(_merged(_defaults().content, _without(content, skip)))

    def leaf(key: str, hint: Any, default: Any) -> Any:
        try:
            return parse_value(values.resolved(key), hint)
        except InvalidValue as unfit:
            problems.append(Problem(key, values.resolved(key), unfit.allowed, unfit.advice))
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(Problem(key, values.raw(key), "resolvable", _why_not_resolved(error)))
        try:
            return parse_value(_defaults().resolved(key), hint)
        except (InvalidValue, OmegaConfBaseException):
            return default

    return build_section(Config, leaf), problems


class _InterpolatedValues:
    """Nested plain values, some of which refer to others. OmegaConf, which is slow, is asked for these only."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    @functools.cached_property
    def _config(self) -> DictConfig:
        return OmegaConf.create(self.content)

    def raw(self, key: str) -> Any:
        """The value before resolution; of a section that is itself a reference, that reference."""
        value: Any = self.content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else value
        return value

    def resolved(self, key: str) -> Any:
        """The value, its references followed. Raises OmegaConfBaseException, RecursionError."""
        value = self.raw(key)
        if not _has_interpolation(value):
            return copy.deepcopy(value) if isinstance(value, (dict, list)) else value
        value = OmegaConf.select(self._config, key, throw_on_missing=True)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _has_interpolation(value: Any) -> bool:
    """Return True if OmegaConf would read another value than the one that is written."""
    if isinstance(value, dict):
        return any(map(_has_interpolation, value.values()))
    if isinstance(value, list):
        return any(map(_has_interpolation, value))
    return is_interpolation(value) or value == "???"


def _merged(defaults: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """The defaults with what is written in their place, mapping by mapping."""
    merged = dict(defaults)
    for name, value in content.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            value = _merged(merged[name], value)
        if value != "???" or name not in merged:  # OmegaConf's "not given"
            merged[name] = value
    return merged


@functools.cache
def _defaults() -> _InterpolatedValues:
    """Interpolations unresolved; not to be written to."""
    return _InterpolatedValues(to_dict(Config()))


def _why_not_resolved(error: Exception) -> str:
    """Return what to do about a reference that cannot be followed."""
    reason = str(error).splitlines()[0] if str(error) else "It refers to itself."
    if found := re.search(r"Environment variable '(\w+)' not found", reason):
        return f"The environment variable {found[1]} is not set: export it, or give this key a value without it."
    return reason


def _without(content: dict[str, Any], skip: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """The same mapping without the keys that are named."""
    return {
        name: _without(value, skip, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in content.items()
        if f"{prefix}{name}" not in skip
    }


def to_config(raw: DictConfig) -> tuple[Config, list[Problem], list[str]]:
    """Turn a composed configuration into the dataclasses, not frozen.

    Returns the configuration, what is wrong with keys and types, and notes about SkyRL's keys without effect.
    """
    content = to_unresolved_dict(raw)
    hydra_section = content.pop("hydra", {})
    taken = list(pop_skyrl_keys(content))
    problems = [*find_hydra_targets(hydra_section), *rename_aliases(content)]
    replace_value_aliases(content)
    problems += find_value_problems("", content)
    config, more = resolve_interpolations(content, [problem.key for problem in problems])
    return config, [*problems, *more, *find_skyrl_key_problems(taken, config)], list(describe_ignored_skyrl_keys(taken))


def load_preset(overrides: Sequence[str] = (), preset: str | None = None) -> Config:
    """The frozen configuration of a preset and overrides, as written: neither fitted to a device nor validated.

    Raises ConfigError for unknown keys and wrong types. Entrypoints use `prepare`, which does all the rest too.
    """
    config, problems, _ = to_config(compose([parse_override(text).for_hydra for text in overrides], preset))
    raise_problems(problems)
    return freeze(config)


def save_resolved(config: Config, path: Path) -> None:
    """Write the configuration as YAML, whole or not at all, without the contents of credential variables.

    `--config-dir FOLDER --config-name NAME` starts from it again.
    """
    text = yaml.safe_dump(
        {"defaults": [BASE_PRESET, "_self_"], **redact(to_dict(config))}, sort_keys=False, allow_unicode=True
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, text)


def print_hydra_info(argv: Sequence[str], overrides: Sequence[str]) -> None:
    """What Hydra's own flags print (`--help`, `--cfg job`, `--info`, ...): the overrides are already checked.

    The contents of credential variables are left out.
    """
    given = list(argv)
    kept = [text for text in given if text not in set(parse_flags(given)[1])]
    sys.argv = [sys.argv[0], *kept, *overrides]
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            hydra.main(version_base="1.3", config_path=str(presets_folder()), config_name=BASE_PRESET)(lambda _: None)()
    finally:
        print(redact(said.getvalue()), end="")
