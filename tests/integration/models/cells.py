"""Cells of the table as parameters of tests, and the tiny models of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model

from .table import ARCHITECTURES, architecture, column


def green(*names: str, elsewhere: Iterable[tuple[str, str]] = ()) -> list[Any]:
    """(architecture, column) of the cells that can, of these columns, without those that another file has."""
    return _cells(names, able=True, without=frozenset(elsewhere))


def red(*names: str) -> list[Any]:
    """(architecture, column) of the cells that cannot."""
    return _cells(names, able=False, without=frozenset())


def _cells(names: Sequence[str], able: bool, without: frozenset[tuple[str, str]]) -> list[Any]:
    found = []
    for name in names:
        for one in ARCHITECTURES:
            if (one.name in column(name).refused) == able or (one.name, name) in without:
                continue
            marks = [pytest.mark.on_demand] if able and one.name != column(name).in_ci else []
            marks += [pytest.mark.slow] if able and name in ("vllm", "sglang") else []
            found.append(pytest.param(one.name, name, id=f"{one.name}-{name}", marks=marks))
    return found


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """The tiny model of a row. What is not trained, such as a bias of DeepSeek's routers, does not follow the seed."""
    row = architecture(name)
    plain = tiny_model(row.kind).config
    config = type(plain)(**{**plain.to_dict(), **row.config})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1 or path.endswith("bias"):  # which begin alike in all models: as ones, as zeros
                parameter.add_(0.1 * torch.randn_like(parameter))
    generator = torch.Generator().manual_seed(0)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the others know no float64
    return model


def attention_of(name: str) -> str:
    """transformers' own implementation that computes what the model is: none but the eager one has sinks."""
    return "eager" if architecture(name).kind == "gpt_oss" else "sdpa"


def save(name: str, folder: Path) -> str:
    """The tiny model and a tokenizer as a Hugging Face folder; returns its path."""
    make(name).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
