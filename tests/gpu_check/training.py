"""Parts 8 and 20: tokens per second of the update alone, and MFU, with random weights of Qwen3-0.6B's shape.

Variants keep, partly keep or recompute activations, compile the layers, or use another attention kernel.

FLOPs per token = 6 P + 6 L H D S, with P parameters, L layers of H query heads of size D, and sequences of S tokens, of
which a token attends to half on average. The tied embedding counts once. Recomputation does not count. This equals
prime-rl's formula, by which 11,896 tok/s of this shape at 16,384 tokens are 11.1 % of an H100's 989 TFLOP/s.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.config.choices import STRATEGIES
from skyrl_train.config.schema import FSDPConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.learner.worker import LearnerWorker, MiniBatch
from skyrl_train.models import ragged_attention
from skyrl_train.models.activation_checkpointing import SELECTIVE
from skyrl_train.models.flash_attention import AttentionFeatures, FlashKernel
from skyrl_train.testing.tiny_models import byte_tokenizer
from tests.gpu_check.attention import usable_kernels
from tests.gpu_check.report import Report, Setting
from tests.support.learner_specs import tiny_spec, with_targets
from tests.support.padded_reference import grouped_batch, ragged_batch

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


@dataclass(frozen=True)
class Variant:
    """A way to run the updates."""

    checkpointing: bool | str = False
    compiled: bool = False
    kernel: FlashKernel | None = None
    """The attention kernel; None for the one that a run would use."""

    def __str__(self) -> str:
        activations = {False: "kept", SELECTIVE: "kept in part", True: "recomputed"}[self.checkpointing]
        options = [f"activations {activations}", *(["compiled"] if self.compiled else [])]
        return ", ".join([*options, *([] if self.kernel is None else [self.kernel.name])])


def run(setting: Setting, report: Report) -> None:
    """Measure updates of two micro-batches of 16,384 tokens. The fastest variant counts.

    First, a small update runs with the GPU's synchronizing operations forbidden.
    """
    with tempfile.TemporaryDirectory() as folder:
        TOY.save(Path(folder))
        check_host_syncs(folder, setting.device, report)
    best = measure_variants(setting, report, 256 if setting.toy else 16_384)
    if not setting.toy:
        report.at_least("tok/s", best, MIN_TOKENS_PER_S)


def run_short(setting: Setting, report: Report) -> None:
    """Measure updates of two micro-batches of 2,048 tokens, which show the time that the host takes."""
    measure_variants(setting, report, 64 if setting.toy else 2_048)


def measure_variants(setting: Setting, report: Report, length: int) -> float:
    """Report a row for each variant, and return the highest number of tokens per second.

    Variants are left out when three quarters of the time limit have passed, and if they need more memory or other
    software than there is.

    Args:
        setting: The device and the time limit.
        report: Receives the rows.
        length: Number of tokens of a micro-batch, which is one sequence.
    """
    shape, steps = (TOY, 2) if setting.toy else (QWEN3_06B, 5)
    start, speeds, peak_tflops = time.monotonic(), [], device_tflops(setting)
    with tempfile.TemporaryDirectory() as folder:
        parameters = shape.save(Path(folder))
        flops_per_token = shape.flops_per_token(parameters, length)
        report.note("parameters", parameters)
        for variant in variants(setting, shape, report):
            if time.monotonic() - start > 0.75 * setting.seconds:
                report.note(str(variant), "left out: no time")
                continue
            measured, problem = None, "not enough memory"
            try:
                with use_kernel(variant.kernel), suppress(torch.OutOfMemoryError):
                    measured = measure(folder, setting.device, variant, length, steps)
            except ConfigError as error:  # for example, there is no compiler
                problem = str(error)
            if measured is None:
                release_memory(setting.device)  # the error, which is gone now, referred to the worker
                report.note(str(variant), f"left out: {problem}")
                continue
            speed, peak = measured
            speeds.append(speed)
            mfu = "" if peak_tflops is None else f", {100 * speed * flops_per_token / (peak_tflops * 1e12):.1f} % MFU"
            report.note(str(variant), f"{speed:,.0f} tok/s{mfu}" + ("" if setting.toy else f", peak {peak:.1f} GiB"))
    best = max(speeds, default=0.0)
    report.note("TFLOP/s", best * flops_per_token / 1e12)
    return best


def variants(setting: Setting, shape: Shape, report: Report) -> Iterator[Variant]:
    """Yield the variants, the most informative first."""
    yield from (Variant(mode) for mode in (False, SELECTIVE, True))
    yield Variant(compiled=True)
    if not setting.toy:
        features = AttentionFeatures(shape.head_size, shape.heads // shape.key_heads)
        kernels = usable_kernels(features, setting.device, torch.bfloat16, report, "updates")
        report.note("kernel of variants that name none", kernels[0].name if kernels else "scaled dot product attention")
        yield from (Variant(kernel=kernel) for kernel in kernels[1:])


def use_kernel(kernel: FlashKernel | None) -> AbstractContextManager[object]:
    """Replace the attention kernel that a run would use, unless it is None."""
    if kernel is None:
        return nullcontext()
    return patch.object(ragged_attention, "get_flash_kernel", lambda *_, **__: kernel)


def device_tflops(setting: Setting) -> float | None:
    """Return the dense bfloat16 TFLOP/s of the GPU; None if they are not known."""
    if setting.toy:
        return None
    board = torch.cuda.get_device_name(0)
    return next((value for name, value in PEAK_TFLOPS.items() if name in board), None)


def measure(path: str, device: str, variant: Variant, length: int, steps: int) -> tuple[float, float]:
    """Return (tokens per second, peak GiB): the median of `steps` updates after one warm-up."""
    spec = tiny_spec(
        path,
        strategy=STRATEGIES["fsdp2"],
        device=device,
        dtype="bfloat16",
        objective=PolicyObjective(partial(clipped_surrogate, eps_clip_low=0.2, eps_clip_high=0.2)),
        gradient_checkpointing=variant.checkpointing,
        use_torch_compile=variant.compiled,
        fsdp_config=FSDPConfig(reshard_after_forward=False, reduce_once=True),  # a run's choice: see memory_tuning.py
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


def check_host_syncs(path: str, device: str, report: Report) -> None:
    """Report whether the host waits for the GPU between the first kernel of an update and the optimizer step.

    The update has all terms of the loss, packed sequences with shared prompts, recomputation and clipping.
    """
    spec = tiny_spec(
        path, strategy=STRATEGIES["fsdp2"], device=device, dtype="bfloat16", gradient_checkpointing=True, threads=None
    )
    worker = LearnerWorker(spec, 0, 1)
    try:
        worker.setup(*worker.address())
        batch = with_targets(grouped_batch([(50, [30, 60, 30]), (20, [40, 7]), (9, [100])], vocab_size=TOY.vocabulary))
        parts = batch.split_micro_batches(max_sequences=3)
        work = MiniBatch(parts, len(parts) + 1, int(batch.loss_mask.sum()), share_prompts=True)
        worker.update(work)  # chooses kernels and compiles them
        sync = "not checked on a CPU"
        if device == "cuda":
            try:
                with forbid_host_syncs():
                    worker.update(work)
                sync = "none"
            except RuntimeError as error:
                sync = str(error).split("\n")[0]
        report.note("waits of the host before the optimizer step", sync, "none", sync == "none" or device != "cuda")
    finally:
        worker.close()
        del worker
        release_memory(device)


@contextmanager
def forbid_host_syncs() -> Iterator[None]:
    """Make operations for which the host waits for the GPU raise RuntimeError, until the first optimizer step ends."""

    def allow(*_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    hook = register_optimizer_step_post_hook(allow)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        allow()
        hook.remove()


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
