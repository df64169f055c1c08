"""Part 8: tokens per second of the update alone, and MFU, with random weights of Qwen3-0.6B's shape.

FLOPs per token = 6 P + 6 L H D S, with P parameters, L layers of H query heads of size D, and sequences of S tokens, of
which a token attends to half on average. The tied embedding counts once. Recomputation does not count. This equals
prime-rl's formula, by which 11,896 tok/s of this shape at 16,384 tokens are 11.1 % of an H100's 989 TFLOP/s.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.config.choices import STRATEGIES
from skyrl_train.config.schema import FSDPConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.learner.worker import LearnerWorker, MiniBatch
from skyrl_train.testing.tiny_models import byte_tokenizer
from tests.gpu_check.report import Report, Setting
from tests.support.learner_specs import tiny_spec, with_targets
from tests.support.padded_reference import ragged_batch

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "B200": 2250.0}
"""TFLOP/s of the SXM boards in dense bfloat16, from NVIDIA's data sheets."""
MIN_TOKENS_PER_S = 23_600.0
"""Twice prime-rl's speed on one H100."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int

    def save(self, folder: Path, sharpness: float = 1.0) -> int:
        """Save a model with random weights and a tokenizer to a Hugging Face folder.

        Args:
            folder: Folder to save to.
            sharpness: Factor of the logits. Random weights have almost equal logits.

        Returns:
            The number of parameters.
        """
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen3",
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_size,
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            model.model.norm.weight.mul_(sharpness)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        return sum(parameter.numel() for parameter in model.parameters())

    def flops_per_token(self, parameters: int, length: int) -> float:
        """Return the FLOPs of forward and backward per token, by the module's formula."""
        return 6.0 * parameters + 6.0 * self.layers * self.heads * self.head_size * length


QWEN3_06B = Shape(1024, 3072, 28, 16, 8, 128, 151_936)
TOY = Shape(64, 128, 2, 4, 2, 32, 320)


def run(setting: Setting, report: Report) -> None:
    """Measure updates of two one-sequence micro-batches, with and without recomputation. The faster variant counts."""
    shape, length, steps = (TOY, 256, 2) if setting.toy else (QWEN3_06B, 16_384, 5)
    speeds = []
    with tempfile.TemporaryDirectory() as folder:
        parameters = shape.save(Path(folder))
        report.note("parameters", parameters)
        for recompute in (True, False):
            what = "recomputed" if recompute else "kept"
            speed, peak = measure(folder, setting.device, recompute, length, steps)
            speeds.append(speed)
            report.note(f"activations {what}: tok/s", speed)
            if not setting.toy:
                report.note(f"activations {what}: peak GiB on the device", peak)
    best = max(speeds)
    flops = best * shape.flops_per_token(parameters, length)
    report.note("TFLOP/s", flops / 1e12)
    if setting.toy:
        return
    name = torch.cuda.get_device_name(0)
    peak_tflops = next((value for board, value in PEAK_TFLOPS.items() if board in name), None)
    report.note("MFU, %", "unknown board" if peak_tflops is None else 100 * flops / (peak_tflops * 1e12))
    report.at_least("tok/s", best, MIN_TOKENS_PER_S)


def measure(path: str, device: str, recompute: bool, length: int, steps: int) -> tuple[float, float]:
    """Return (tokens per second, peak GiB): the median of `steps` updates after one warm-up."""
    spec = tiny_spec(
        path,
        strategy=STRATEGIES["fsdp2"],
        device=device,
        dtype="bfloat16",
        objective=PolicyObjective(partial(clipped_surrogate, eps_clip_low=0.2, eps_clip_high=0.2)),
        gradient_checkpointing=recompute,
        fsdp_config=FSDPConfig(reshard_after_forward=False, reduce_once=True),  # a run's choice: see memory_fit.py
    )
    worker = LearnerWorker(spec, 0, 1)
    try:
        worker.setup(*worker.address())
        batches = [make_batch(length, seed) for seed in range(2)]
        work = MiniBatch(batches, len(batches), sum(int(batch.loss_mask.sum()) for batch in batches))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            worker.update(work)  # returns the gradient's norm, so that it waits for the device
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        return len(batches) * length / statistics.median(seconds[1:]), peak
    finally:
        worker.close()
        del worker
        release_memory(device)


def release_memory(device: str) -> None:
    """Release torch's cache and the memory of a closed worker, which is in a reference cycle."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def make_batch(length: int, seed: int) -> TrainBatch:
    """Return one sequence in which every token but the first is trained on."""
    batch = ragged_batch((length,), seed=seed)
    batch = with_targets(batch.with_tokens(loss_mask=batch.position_ids > 0), seed)
    return batch.with_tokens(old_logprobs=None, ref_logprobs=None)
