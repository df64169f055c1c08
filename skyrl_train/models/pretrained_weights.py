"""A checkpoint's weights, read parameter by parameter and row by row, so that a rank reads no more than it keeps.

transformers describes how a checkpoint's tensors become a model's parameters: under other names, and merged where a
mixture's experts are saved one by one. Here that is done for what is asked for, not for the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from skyrl_train.models.composite import get_composite

ALL_ROWS = slice(None)


class PretrainedWeights:
    """The parameters and persistent buffers of one model in its checkpoint's files, which are mapped into memory.

    Tensors have the dtype of the file. One that is saved as it is shares the file's pages, as every process's mapping
    of the file does; one that is made of several is a copy.
    """

    def __init__(self, model: PreTrainedModel, files: Iterable[str | Path]):
        """`model`: on the meta device, as it was loaded from these files; the text model of a composite, too."""
        composite = get_composite(model)
        self._model = model = model if composite is None else composite.model
        self._names = {} if composite is None else composite.tensor_names
        """Name of a tensor of a text model -> its name in the composite."""
        self._body = "" if composite is None else f"{composite.body_path}."
        self._renamed: dict[str, str] = {}
        """Name in the files -> name in the model, or what it would be if the model had it."""
        self._slices: dict[str, Any] = {}
        for file in files:
            opened = safe_open(file, framework="pt")
            self._slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        self._tensors: dict[str, tuple[WeightConverter | None, dict[str, list[str]]]] = {}
        """Name -> the converter that makes it, if any, and the keys of the file by the converter's pattern."""
        self._first: dict[str, str] = {}
        """Name -> the name under which it is in `_tensors`, if several are made at once, or are the same."""
        self._map_tensors(model)

    def __contains__(self, name: str) -> bool:
        return self._names.get(name, name) in self._first

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """These rows of a parameter or buffer, by its name in the model; the result must not be changed."""
        name = self._names.get(name, name)
        converter, keys = self._tensors[self._first[name]]
        if converter is None:
            ((key,),) = keys.values()
            return self._read_from_file(key, rows)
        first, made, merges = self._first[name], deepcopy(converter), _merges_rows(converter)
        for pattern, sources in keys.items():
            for key in sources[rows] if merges else sources:
                tensor: Any = partial(self._read_from_file, key, ALL_ROWS)
                made.add_tensor(first, key, pattern, tensor)
        converted = made.convert(first, model=self._model, config=self._model.config)[name]
        tensor = converted[0] if isinstance(converted, list) else converted
        return tensor if merges else tensor[rows]

    def iter_row_blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a parameter or buffer in blocks of rows: one expert at a time, if each is saved by itself."""
        converter, _ = self._tensors[self._first[self._names.get(name, name)]]
        if converter is None or not _merges_rows(converter):
            yield self.read(name)
            return
        for row in range(self.count_rows(name)):
            yield self.read(name, slice(row, row + 1))

    def count_rows(self, name: str) -> int:
        """The length of a parameter's or buffer's first dimension."""
        converter, keys = self._tensors[self._first[self._names.get(name, name)]]
        if converter is None:
            ((key,),) = keys.values()
            return int(self._slices[key].get_shape()[0])
        return len(next(iter(keys.values()))) if _merges_rows(converter) else len(self.read(name))

    def iter_non_text_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the files, tensor) of what a composite has beside its language model, as it is saved."""
        inner = set(self._names.values())
        for key, name in self._renamed.items():
            if name not in inner and not name.startswith(self._body):
                yield key, self._read_from_file(key, ALL_ROWS)

    def _read_from_file(self, key: str, rows: slice) -> Tensor:
        saved = self._slices[key]
        tensor: Tensor = saved[...] if rows == ALL_ROWS else saved[rows]
        return tensor

    def _map_tensors(self, model: PreTrainedModel) -> None:
        """Find out what every tensor of the model is made of, as `from_pretrained` does."""
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        wanted: dict[str, Any] = model.state_dict()
        for key in sorted(self._slices, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
            self._renamed[key] = name
            if name not in wanted:
                continue
            converter = None if pattern is None else by_pattern[pattern]
            keys = self._tensors.setdefault(name, (converter, {}))[1]
            keys.setdefault(pattern or key, []).append(key)
            targets = [name] if converter is None else converter.target_patterns
            self._first |= {name.replace(targets[0], target): name for target in targets} if converter else {name: name}
        same: dict[int, str] = {}
        named = list(model.named_parameters(remove_duplicate=False))
        for name, parameter in named:
            if name in self._first:
                same.setdefault(id(parameter), self._first[name])
        self._first |= {name: same[id(parameter)] for name, parameter in named if id(parameter) in same}


def _merges_rows(converter: WeightConverter) -> bool:
    """Whether a row of the result is made of one source of each kind: an expert."""
    merge, *others = converter.operations
    return (
        isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and all(isinstance(one, Concatenate) and one.dim > 0 for one in others)
    )


def materialize_buffers(model: PreTrainedModel, pretrained: PretrainedWeights) -> None:
    """Give a model on the meta device, on the CPU, all but its parameters: its buffers.

    What no file has is computed as `from_pretrained` does, such as the frequencies of rotary embeddings.
    """
    buffers = dict(model.named_buffers())
    for name, tensor in buffers.items():
        owner, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        setattr(module, attribute, torch.empty_like(tensor, device="cpu"))
        module._is_hf_initialized = False
    model.initialize_weights()
    for name, _ in buffers.items():
        if name in pretrained:
            model.get_buffer(name).copy_(pretrained.read(name))


def tie_equal_weights(model: PreTrainedModel, pretrained: PretrainedWeights) -> None:
    """Tie what should be the same and is saved twice, if it is equal: on the meta device `from_pretrained` cannot."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    for name, source in list(tied.items()):
        parameter = model.get_parameter(source)
        if model.get_parameter(name) is parameter:
            continue
        if torch.equal(pretrained.read(name), pretrained.read(source)):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)
        else:
            del tied[name]
