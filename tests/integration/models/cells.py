"""Cells of the table as parameters of tests, and the tiny models of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from skyrl_train.models.recurrent_layers import MAMBA2, get_recurrent_mixers
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_config

from .table import ARCHITECTURES, HybridRow, architecture, column


def supported_cells(*names: str, elsewhere: Iterable[tuple[str, str]] = ()) -> list[Any]:
    """Return (architecture, column) of the supported cells of these columns, except those in another file."""
    return _cells(names, supported=True, excluded=frozenset(elsewhere))


def rejected_cells(*names: str) -> list[Any]:
    """Return (architecture, column) of the rejected cells of these columns."""
    return _cells(names, supported=False, excluded=frozenset())


def _cells(names: Sequence[str], supported: bool, excluded: frozenset[tuple[str, str]]) -> list[Any]:
    cells = []
    for name in names:
        for row in ARCHITECTURES:
            if (row.name in column(name).refused) == supported or (row.name, name) in excluded:
                continue
            marks = [pytest.mark.on_demand] if supported and row.name != column(name).in_ci else []
            marks += [pytest.mark.slow] if supported and name in ("vllm", "sglang") else []
            cells.append(pytest.param(row.name, name, id=f"{row.name}-{name}", marks=marks))
    return cells


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Return the tiny model of a row.

    Untrained values, such as a bias of DeepSeek's routers, do not depend on the seed.
    """
    row = architecture(name)
    model = _build(tiny_config(row.kind), row.config, dtype, seed)
    generator = torch.Generator().manual_seed(0)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the others do not support float64
    return model


def make_hybrid(row: HybridRow, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Return the tiny model of a hybrid, with sizes that vLLM serves on CPUs, whose log-probs depend on its states."""
    model = _build(tiny_config(row.kind, hidden_size=128, layers=4, tied=False), row.config, dtype, seed)
    for mixer in get_recurrent_mixers(model).values():
        if mixer.kind is MAMBA2:  # Initially its state decays within a few tokens and hardly changes the output.
            with torch.no_grad():
                mixer.module.A_log.sub_(2.0)
                mixer.module.dt_bias.add_(2.0)
                mixer.module.conv1d.weight.mul_(2.0)
    return model


def _build(plain: PreTrainedConfig, changes: Mapping[str, Any], dtype: torch.dtype, seed: int) -> PreTrainedModel:
    config = type(plain)(**{**plain.to_dict(), **changes})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1 or path.endswith("bias"):  # their initial values are ones or zeros in all models
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def reference_attention(name: str) -> str:
    """Return transformers' attention implementation that computes the model: only eager attention has sinks."""
    return "eager" if architecture(name).kind == "gpt_oss" else "sdpa"


def save(name: str, folder: Path) -> str:
    """Save the tiny model and a tokenizer as a Hugging Face folder, and return its path."""
    make(name).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def save_hybrid(row: HybridRow, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Save the tiny model of a hybrid and a tokenizer as a Hugging Face folder, and return its path."""
    make_hybrid(row, dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
