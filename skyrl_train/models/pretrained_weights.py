"""Pretrained weights, read parameter by parameter and row by row, so that a rank reads no more than it keeps.

transformers describes how a checkpoint's tensors become a model's parameters: under other names, and merged if the
files hold a mixture's experts separately. This module does that for the requested rows, not for the full model.
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
"""The slice of all rows of a tensor."""


class PretrainedWeights:
    """The parameters and persistent buffers of one model in its pretrained weight files, which are mapped into memory.

    Tensors have the dtype of the file. A tensor that one tensor of a file holds unchanged shares the file's pages, as
    every process's mapping of the file does. A tensor that is converted from several is a copy.
    """

    def __init__(self, model: PreTrainedModel, files: Iterable[str | Path]):
        """Map the files and find the sources of every tensor.

        Args:
            model: A model on the meta device, with the configuration of these files. It may be the text model of a
                composite.
            files: The safetensors files.

        Raises:
            OSError: A file cannot be read.
            SafetensorError: A file is not valid.
        """
        composite = get_composite(model)
        self._model = model = model if composite is None else composite.model
        self._names = {} if composite is None else composite.tensor_names
        """Name of a tensor of a text model -> its name in the composite."""
        self._body = "" if composite is None else f"{composite.body_path}."
        self._renamed: dict[str, str] = {}
        """Name in the files -> name in the model, or the name it would have if the model had it."""
        self._slices: dict[str, Any] = {}
        for file in files:
            opened = safe_open(file, framework="pt")
            self._slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        self._tensors: dict[str, tuple[WeightConverter | None, dict[str, list[str]]]] = {}
        """Name -> the converter that makes the tensor, if any, and the keys of the files by the converter's pattern."""
        self._first: dict[str, str] = {}
        """Name -> the name of its entry in `_tensors`. Tensors share an entry if one converter makes them or they are
        tied.
        """
        self._map_tensors(model)

    def __contains__(self, name: str) -> bool:
        return self._names.get(name, name) in self._first

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """Return rows of a parameter or buffer, in the file's dtype.

        Args:
            name: Its name in the model.
            rows: The rows to read; by default all.

        Returns:
            The rows; they must not be changed, because they may be pages of the file.

        Raises:
            KeyError: The files have no such tensor.
        """
        name = self._names.get(name, name)
        converter, keys = self._tensors[self._first[name]]
        if converter is None:
            ((key,),) = keys.values()
            return self._read_from_file(key, rows)
        entry, conversion, has_row_sources = self._first[name], deepcopy(converter), _merges_rows(converter)
        for pattern, sources in keys.items():
            for key in sources[rows] if has_row_sources else sources:
                tensor: Any = partial(self._read_from_file, key, ALL_ROWS)
                conversion.add_tensor(entry, key, pattern, tensor)
        converted = conversion.convert(entry, model=self._model, config=self._model.config)[name]
        tensor = converted[0] if isinstance(converted, list) else converted
        return tensor if has_row_sources else tensor[rows]

    def iter_row_blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a parameter or buffer in blocks of rows.

        A block is one expert if the files hold experts separately, else the full tensor.
        """
        converter, _ = self._tensors[self._first[self._names.get(name, name)]]
        if converter is None or not _merges_rows(converter):
            yield self.read(name)
            return
        for row in range(self.count_rows(name)):
            yield self.read(name, slice(row, row + 1))

    def count_rows(self, name: str) -> int:
        """Return the length of a parameter's or buffer's first dimension."""
        converter, keys = self._tensors[self._first[self._names.get(name, name)]]
        if converter is None:
            ((key,),) = keys.values()
            return int(self._slices[key].get_shape()[0])
        return len(next(iter(keys.values()))) if _merges_rows(converter) else len(self.read(name))

    def iter_non_text_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the files, tensor) of a composite's tensors outside its language model, unchanged."""
        inner = set(self._names.values())
        for key, name in self._renamed.items():
            if name not in inner and not name.startswith(self._body):
                yield key, self._read_from_file(key, ALL_ROWS)

    def _read_from_file(self, key: str, rows: slice) -> Tensor:
        saved = self._slices[key]
        tensor: Tensor = saved[...] if rows == ALL_ROWS else saved[rows]
        return tensor

    def _map_tensors(self, model: PreTrainedModel) -> None:
        """Find the sources of every tensor of the model, as `from_pretrained` does."""
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        by_pattern = {pattern: transform for transform in converters for pattern in transform.source_patterns}
        state_dict: dict[str, Any] = model.state_dict()
        for key in sorted(self._slices, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state_dict)
            if name not in state_dict and key in state_dict:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state_dict)
            self._renamed[key] = name
            if name not in state_dict:
                continue
            converter = None if pattern is None else by_pattern[pattern]
            keys = self._tensors.setdefault(name, (converter, {}))[1]
            keys.setdefault(pattern or key, []).append(key)
            targets = [name] if converter is None else converter.target_patterns
            self._first |= {name.replace(targets[0], target): name for target in targets} if converter else {name: name}
        entry_by_parameter: dict[int, str] = {}
        named = list(model.named_parameters(remove_duplicate=False))
        for name, parameter in named:
            if name in self._first:
                entry_by_parameter.setdefault(id(parameter), self._first[name])
        self._first |= {
            name: entry_by_parameter[id(parameter)] for name, parameter in named if id(parameter) in entry_by_parameter
        }


def _merges_rows(converter: WeightConverter) -> bool:
    """True if each row of the result comes from one source of each kind: an expert."""
    merge, *others = converter.operations
    return (
        isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
    )


def materialize_buffers(model: PreTrainedModel, pretrained: PretrainedWeights) -> None:
    """Move all buffers of a meta-device model to the CPU and fill them.

    Buffers that the files contain are read. All others, such as the frequencies of rotary embeddings, are computed as
    `from_pretrained` does.
    """
    buffers = dict(model.named_buffers())
    for name, tensor in buffers.items():
        owner, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        setattr(module, attribute, torch.empty_like(tensor, device="cpu"))
        module._is_hf_initialized = False
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # Falcon-H1's body fills buffers of its layers.
            module._is_hf_initialized = False
    model.initialize_weights()
    for name, _ in buffers.items():
        if name in pretrained:
            model.get_buffer(name).copy_(pretrained.read(name))


def tie_equal_weights(model: PreTrainedModel, pretrained: PretrainedWeights) -> None:
    """Tie parameters of a meta-device model that the configuration ties and the files hold twice with equal values.

    `from_pretrained` cannot compare them on the meta device. Parameters with different values are removed from the
    model's tied weights.
    """
    tied_names: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    for name, source in list(tied_names.items()):
        parameter = model.get_parameter(source)
        if model.get_parameter(name) is parameter:
            continue
        if torch.equal(pretrained.read(name), pretrained.read(source)):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)
        else:
            del tied_names[name]
