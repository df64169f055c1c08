"""LoRA adapters for tiny models, in the folder format of peft."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")


def save_tiny_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    targets: Sequence[str] = TARGETS,
    rank: int = 4,
    alpha: int = 8,
    seed: int = 0,
    **options: Any,
) -> str:
    """Save random A and B for the linear layers `targets`, large enough to change tokens. Return the folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            linear: Any = module
            for end, shape in (("A", (rank, linear.in_features)), ("B", (linear.out_features, rank))):
                tensors[f"base_model.model.{name}.lora_{end}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": alpha}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(targets), **options}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


@torch.no_grad()
def merged(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Return a copy of the model with weights W + alpha / r · B A."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    adapted = copy.deepcopy(model)
    for key, down in tensors.items():
        if key.endswith(".lora_A.weight"):
            layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[key.replace(".lora_A.", ".lora_B.")]
            adapted.get_submodule(layer).weight += config["lora_alpha"] / config["r"] * (up @ down)
    return adapted


@torch.no_grad()
def fill_adapters(model: nn.Module, seed: int = 0) -> None:
    """Set random A and B in a model with adapters, equal in all processes. The initial zeros of B would hide A."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
