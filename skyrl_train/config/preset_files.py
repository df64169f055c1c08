"""The user's YAML files, checked before OmegaConf reads them: it expands aliases however often, and in circles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from skyrl_train.errors import ConfigError

HEADER = 512
"""Characters in which Hydra looks for a file's `# @package`."""
MAX_BYTES = 2**20
MAX_NODES = 100_000
"""Values in a file once its aliases are expanded."""
MAX_DEPTH = 50
"""Levels of a file once its aliases are expanded."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class PresetSource(ConfigSource):
    """Hydra's way to files of a folder, `preset://FOLDER`, with `check_preset` in front of every file that it loads."""

    @staticmethod
    def scheme() -> str:
        return "preset"

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._file(config_path)
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found: {file}")
        check_preset(file)
        try:
            header = self._get_header_dict(file.read_text(encoding="utf-8")[:HEADER])
            return ConfigResult(self.provider, self.full_path(), OmegaConf.load(file), header)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:  # a tag, a huge number
            raise ConfigError(f"{file}: has a value that cannot be read: {error}") from error

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return os.path.isdir(os.path.join(self.path, config_path))

    def is_config(self, config_path: str) -> bool:
        return os.path.isfile(self._file(config_path))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found: list[str] = []
        for name in os.listdir(os.path.join(self.path, config_path)):
            self._list_add_result(found, os.path.join(config_path, name), name, results_filter)
        return sorted(set(found))

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))


class SearchedFolder(SearchPathPlugin):
    """Adds the folder of `searched` to where Hydra looks, after its own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (folder := _folder.get()) is not None:
            search_path.append("command-line", f"{PresetSource.scheme()}://{Path(folder).resolve()}")


_folder: ContextVar[str | None] = ContextVar("folder", default=None)


@contextmanager
def searched(folder: str | None) -> Iterator[None]:
    """In the block Hydra also finds the presets of `folder`, if there is one."""
    for plugin in (PresetSource, SearchedFolder):
        Plugins.instance().register(plugin)
    before = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(before)


def check_preset(file: Path) -> None:
    """Raise ConfigError for a file that is hostile or broken.

    One that is not UTF-8 or not YAML, too large or too deep, or whose aliases refer to themselves or expand to more
    than MAX_NODES values.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{file}: has more than {MAX_BYTES} bytes; a preset is a list of keys.")
        text = file.read_text(encoding="utf-8")
        _refuse_deep(file, text)
        root: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8 ({error.reason}); a preset is a text.") from error
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    _extent(file, root, {})


def _refuse_deep(file: Path, text: str) -> None:
    """Events come one by one; what composes them recurses, in C, and would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _too_deep(file)


def _extent(file: Path, node: yaml.Node | None, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """(values, levels) of a node with aliases expanded. `known`: by node; None is for those above the node."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1, 1
    if id(node) not in known:
        known[id(node)] = None
        extents = [_extent(file, child, known) for child in _children(node)]
        values = 1 + sum(values for values, _ in extents)
        levels = 1 + max((levels for _, levels in extents), default=0)
        if values > MAX_NODES:
            raise ConfigError(f"{file}: has more than {MAX_NODES} values once its aliases are expanded.")
        if levels > MAX_DEPTH:
            raise _too_deep(file)
        known[id(node)] = values, levels
    found = known[id(node)]
    if found is None:
        raise ConfigError(f"{file}, line {node.start_mark.line + 1}: refers to itself through an alias.")
    return found


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    for child in node.value:
        yield from child if isinstance(child, tuple) else (child,)


def _too_deep(file: Path) -> ConfigError:
    return ConfigError(f"{file}: is more than {MAX_DEPTH} levels deep.")
