"""The user's YAML files, checked before Hydra reads them: Hydra expands aliases however often, and in circles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from skyrl_train.errors import ConfigError

MAX_BYTES = 2**20
MAX_NODES = 100_000
"""Values in a file once its aliases are expanded."""
MAX_DEPTH = 200
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_preset(folder: Path, name: str) -> None:
    """Check `<folder>/<name>.yaml`, and the files of the folder that its defaults list names, if they exist.

    Raises ConfigError for a file that is not UTF-8 or not YAML, too large or too deep, or whose aliases refer to
    themselves or expand to more than MAX_NODES values.
    """
    waiting, seen = [folder / f"{name.removesuffix('.yaml')}.yaml"], set[Path]()
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        root = _parsed(file)
        _expanded_size(file, root, {})
        waiting += [file.parent / f"{default}.yaml" for default in _defaults(root)]


def _parsed(file: Path) -> yaml.Node | None:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{file}: has more than {MAX_BYTES} bytes; a preset is a list of keys.")
        text = file.read_text(encoding="utf-8")
        _refuse_deep(file, text)
        node: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8 ({error.reason}); a preset is a text.") from error
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    return node


def _refuse_deep(file: Path, text: str) -> None:
    """Events come one by one; what composes them recurses, in C, and would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{file}: is more than {MAX_DEPTH} levels deep.")


def _expanded_size(file: Path, node: yaml.Node | None, sizes: dict[int, int]) -> int:
    """Values below a node, aliases expanded. `sizes`: by node; -1 is for those above the node."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    size = sizes.get(id(node))
    if size is None:
        sizes[id(node)] = -1
        size = 1 + sum(_expanded_size(file, child, sizes) for child in _children(node))
        sizes[id(node)] = size
    if size < 0:
        raise ConfigError(f"{file}, line {node.start_mark.line + 1}: refers to itself through an alias.")
    if size > MAX_NODES:
        raise ConfigError(f"{file}: has more than {MAX_NODES} values once its aliases are expanded.")
    return size


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    for child in node.value:
        yield from child if isinstance(child, tuple) else (child,)


def _defaults(root: yaml.Node | None) -> Iterator[str]:
    """Entries of the defaults list: `name`, or `group/option` for `group: option`."""
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            for item in value.value:
                if isinstance(item, yaml.ScalarNode):
                    yield item.value
                elif isinstance(item, yaml.MappingNode):
                    yield from (f"{group.value}/{option.value}" for group, option in item.value)
