"""The user's YAML files, checked before OmegaConf reads them: it expands aliases however often, and in circles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult

from skyrl_train.errors import ConfigError

MAX_BYTES = 2**20
MAX_NODES = 100_000
"""Values in a file once its aliases are expanded."""
MAX_DEPTH = 50
"""Levels of a file once its aliases are expanded."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class PresetSource(FileConfigSource):
    """Hydra's way to files of a folder, `preset://FOLDER`, with `check_preset` in front of every file that it loads."""

    @staticmethod
    def scheme() -> str:
        return "preset"

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        if file.is_file():
            check_preset(file)
        try:
            return super().load_config(config_path)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:  # a tag, a huge number
            raise ConfigError(f"{file}: has a value that cannot be read: {error}") from error


SourcesRegistry.instance().register(PresetSource)


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
