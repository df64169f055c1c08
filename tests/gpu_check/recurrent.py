"""Part 18: the kernels of recurrent layers for packed sequences, against the definitions of the recurrences in float64.

The bound of a kernel's error is twice that of transformers' PyTorch function for each sequence alone, in the same
dtype, beyond a floor. The last rows run small models, with and without the kernels, and in float32 in the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from inspect import unwrap
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h

from skyrl_train.data.device_copy import copy_to_device
from skyrl_train.engines.transformers.cache import DecodeCache, NewPrompt, PromptKey
from skyrl_train.engines.transformers.model_runner import ModelRunner
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.ragged_attention import PackedSequences
from skyrl_train.models.recurrent_kernels import KERNELS, has_kernels
from tests.gpu_check.report import Missing, Report, Setting
from tests.support.padded_reference import grouped_batch
from tests.support.recurrences import REFERENCES
from tests.support.tiny_families import tiny_family

LENGTHS = (300, 1, 64, 200, 65)
TIMED_LENGTHS = (2048,) * 8
HEADS, SIZE, CHANNELS = 4, 128, 256
FLOOR = 2e-3
"""Relative error, of the norm."""
MODELS = ("qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2")
NATS_FLOOR = 0.02
Inputs = dict[str, Tensor]


def run(setting: Setting, report: Report) -> None:
    """Compare outputs and gradients of every kernel, and log-probs of models and engines. Report the kernels' speed."""
    if not setting.toy and not has_kernels():
        raise Missing("fla-core: pip install 'skyrl-train[hybrid]'")
    for name in KERNELS:
        compare_kernel(name, setting, report)
        compare_sequence_alone(name, setting, report)
    for kind in MODELS:
        compare_models(kind, setting, report)
        compare_float32_engine(kind, setting, report)


def make_inputs(name: str, tokens: int, device: str) -> Inputs:
    """Return random inputs of a function by the names of its parameters; those with tokens are [1, tokens, ...]."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if name == "causal_conv1d_fn":
        inputs = {"hidden_states": draw(1, CHANNELS, tokens), "weight": draw(CHANNELS, 4), "bias": draw(CHANNELS)}
    elif name == "mamba2_chunk_scan":
        inputs = {
            "hidden_states": draw(1, tokens, HEADS, SIZE),
            "dt": draw(1, tokens, HEADS),
            "A": -draw(HEADS).exp(),
            "B": draw(1, tokens, 2, SIZE),
            "C": draw(1, tokens, 2, SIZE),
            "D": draw(HEADS),
            "dt_bias": draw(HEADS),
        }
    else:
        decay = (SIZE,) if name == "chunk_kimi_delta_attention" else ()
        inputs = {part: draw(1, tokens, HEADS, SIZE) for part in ("query", "key", "value")}
        inputs |= {"g": -draw(1, tokens, HEADS, *decay).abs(), "beta": draw(1, tokens, HEADS).sigmoid()}
    floats = ("A", "D", "dt_bias", "g", "weight", "bias")
    return {part: x.to(device, torch.float32 if part in floats else torch.bfloat16) for part, x in inputs.items()}


def get_options(name: str) -> dict[str, Any]:
    if name == "causal_conv1d_fn":
        return {"activation": "silu"}
    if name == "mamba2_chunk_scan":
        return {"chunk_size": 64, "dt_softplus": True, "dt_limit": (0.001, float("inf"))}
    return {"use_qk_l2norm_in_kernel": True}


def get_plain_function(name: str) -> Callable[..., Any]:
    """Return transformers' PyTorch function. All modeling modules have the same."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    for module in (modeling_qwen3_next, modeling_kimi_linear, modeling_nemotron_h):
        if hasattr(module, name):
            return unwrap(getattr(module, name))
    raise AssertionError(name)


def run_each(function: Callable[..., Any], name: str, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
    """Return the outputs of a function for each sequence alone, concatenated."""
    dim, tokens = 2 if name == "causal_conv1d_fn" else 1, sum(lengths)
    outputs, start = [], 0
    for length in lengths:
        part = {
            key: x.narrow(dim, start, length) if x.ndim > 2 and x.shape[dim] == tokens else x
            for key, x in inputs.items()
        }
        outputs.append(first(function(**part, **get_options(name))))
        start += length
    return torch.cat(outputs, dim)


def first(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def compute(function: Callable[[Inputs], Tensor], inputs: Inputs) -> Inputs:
    """Return the output and the gradients of all inputs, by name."""
    leaves = {key: x.detach().clone().requires_grad_() for key, x in inputs.items()}
    output = function(leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    gradients = torch.autograd.grad((output * weights).sum(), list(leaves.values()))
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def compare_kernel(name: str, setting: Setting, report: Report) -> None:
    """Report the relative error of each tensor, with a bound from the error of the PyTorch function."""
    lengths = tuple(max(1, length // 8) for length in LENGTHS) if setting.toy else LENGTHS
    inputs, plain = make_inputs(name, sum(lengths), setting.device), get_plain_function(name)
    sequences = PackedSequences.from_lengths(list(lengths), torch.device(setting.device))

    def run_kernel(inputs: Inputs) -> Tensor:
        if setting.toy:
            return run_each(plain, name, inputs, lengths)
        return first(call_kernel(name, inputs, sequences))

    reference: Any = REFERENCES[name]
    exact = compute(
        lambda inputs: run_each(reference, name, inputs, lengths), {key: x.double() for key, x in inputs.items()}
    )
    by_plain = compute(lambda inputs: run_each(plain, name, inputs, lengths), inputs)
    by_kernel = compute(run_kernel, inputs)
    for key, expected in exact.items():
        error, plain_error = (
            float((results[key].double() - expected).norm() / expected.norm()) for results in (by_kernel, by_plain)
        )
        report.at_most(f"{name}: relative error of {key}", error, 2 * plain_error + FLOOR)
    if not setting.toy:
        report.note(f"{name}: times as fast as PyTorch", measure_speedup(name, setting.device, plain))


def compare_sequence_alone(name: str, setting: Setting, report: Report) -> None:
    """Check that a packed row has the same bits as each of its sequences alone.

    Sequences are at least as long as a chunk, because kernels may choose smaller chunks for a shorter row.
    """
    lengths = tuple(length for length in LENGTHS if length >= 64)
    inputs = make_inputs(name, sum(lengths), setting.device)

    def run_kernel(*, lengths: Sequence[int], **inputs: Tensor) -> Tensor:
        if setting.toy:
            return run_each(get_plain_function(name), name, inputs, lengths)
        return first(call_kernel(name, inputs, PackedSequences.from_lengths(lengths, torch.device(setting.device))))

    packed = run_kernel(lengths=lengths, **inputs)
    dim, starts = 2 if name == "causal_conv1d_fn" else 1, (0, *accumulate(lengths))
    differing = 0
    for start, length in zip(starts, lengths, strict=False):
        alone = run_kernel(
            lengths=[length],
            **{
                key: x.narrow(dim, start, length) if x.ndim > 2 and x.shape[dim] == sum(lengths) else x
                for key, x in inputs.items()
            },
        )
        differing += int((alone != packed.narrow(dim, start, length)).sum())
    report.at_most(f"{name}: numbers that differ between a sequence alone and in a packed row", differing, 0)


def call_kernel(name: str, inputs: Inputs, sequences: PackedSequences) -> Any:
    positional = [x for key, x in inputs.items() if key not in ("g", "beta", "D", "dt_bias")]
    named = {key: x for key, x in inputs.items() if key in ("g", "beta", "D", "dt_bias")}
    return KERNELS[name](*positional, **named, **get_options(name), sequences=sequences)


def measure_speedup(name: str, device: str, plain: Callable[..., Any]) -> float:
    """Return the time of the PyTorch function, sequence by sequence, over that of the kernel, both with backward."""
    inputs = make_inputs(name, sum(TIMED_LENGTHS), device)
    sequences = PackedSequences.from_lengths(list(TIMED_LENGTHS), torch.device(device))
    functions: tuple[Callable[[Inputs], Tensor], ...] = (
        lambda inputs: run_each(plain, name, inputs, TIMED_LENGTHS),
        lambda inputs: first(call_kernel(name, inputs, sequences)),
    )
    seconds = []
    for function in functions:
        compute(function, inputs)  # compiles
        torch.cuda.synchronize()
        start = time.monotonic()
        compute(function, inputs)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
    return seconds[0] / seconds[1]


def compare_models(kind: str, setting: Setting, report: Report) -> None:
    """Report the difference of bfloat16 log-probs from float32 ones on the CPU, with and without the kernels."""
    batch = grouped_batch([(40, [30, 100, 7]), (5, [80])])

    @torch.no_grad()
    def compute_logprobs(device: str, dtype: torch.dtype) -> Tensor:
        model: Any = tiny_family(kind, AutoModelForCausalLM)
        model.to(device, dtype)
        logprob_model = LogprobModel(model)
        inputs = logprob_model.lay_out(batch, batch.shared_prompt_lengths())
        scores = logprob_model(copy_to_device(inputs, device))
        return scores.logprobs.float().cpu()  # type: ignore[no-any-return]

    exact = compute_logprobs("cpu", torch.float32)
    with_kernels = compute_logprobs(setting.device, torch.bfloat16)
    with patch.dict(KERNELS, clear=True):
        without = compute_logprobs(setting.device, torch.bfloat16)
    errors = [float((logprobs - exact).abs().mean()) for logprobs in (with_kernels, without)]
    report.at_most(f"{kind}: log-probs in bfloat16, mean error", errors[0], 2 * errors[1] + NATS_FLOOR, "nats")


def compare_float32_engine(kind: str, setting: Setting, report: Report) -> None:
    """Report the largest difference of a sequence's float32 log-probs between the transformers engine and learner."""
    batch = grouped_batch([(40, [30])], temperature=1.0)
    ids: list[int] = batch.input_ids.tolist()
    device = torch.device(setting.device)
    trained, served = (tiny_family(kind, AutoModelForCausalLM) for _ in range(2))
    learner = LogprobModel(trained).to(device)
    runner = ModelRunner(served, device, kind)
    prompt, responses = PromptKey(tuple(ids[:40])), ids[40:]
    with torch.inference_mode():
        expected = learner(copy_to_device(learner.lay_out(batch), device)).logprobs[40:]
        packed, starts, logits = runner.prefill([prompt])
        cache = DecodeCache(device)
        slots = sorted(cache.allocate_slots([NewPrompt(prompt, 1, starts[0])], packed, frozenset()))
        rows = [logits[0]]
        for step, token in enumerate(responses[:-1]):
            cache.begin(slots, [step])
            rows.append(runner.decode(torch.tensor([token], device=device), cache)[0])
    tokens = torch.tensor(responses, device=device).unsqueeze(1)
    actual = torch.stack(rows).float().log_softmax(-1).gather(1, tokens).squeeze(1)
    report.at_most(
        f"{kind}: float32 log-probs of engine and learner", float((actual - expected).abs().max()), 1e-4, "nats"
    )
