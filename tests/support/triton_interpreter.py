"""The kernels of models/fused_logprobs.py, run by Triton's interpreter on a CPU: `TRITON_INTERPRET=1 python -m ...`.

It must be a process of its own, as the variable counts when Triton is imported. Prints JSON: for every case, the
largest deviation of each result from the eager passes in double precision; and how many chunks were saved.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import torch
from torch import Tensor

from skyrl_train.models.logits import LogitTransform
from skyrl_train.models.sampled_logprobs import sampled_logprobs

ROWS, SIZE = 7, 6
VOCABULARIES = {"one block": 11, "three blocks": 9001}
SHAPES = {
    "plain": LogitTransform(),
    "factor": LogitTransform(factor=0.3),
    "capped": LogitTransform(factor=1.5, softcap=2.0),
}
CHUNKS = {"one chunk": (100, 0), "three chunks": (3, 0), "three chunks, two kept": (3, 2)}
LOSSES = {"both": (1.0, 0.7), "log-probs": (1.0, 0.0), "entropy": (0.0, 1.0)}
CASES = [" / ".join(case) for case in product(VOCABULARIES, SHAPES, CHUNKS, LOSSES)]


def inputs(vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, SIZE, generator=generator, dtype=torch.float64) for n in (ROWS, vocabulary))
    targets = torch.randint(0, vocabulary, (ROWS,), generator=generator)
    targets[0] = vocabulary - 1
    divisor = 0.5 + torch.rand(ROWS, generator=generator, dtype=torch.float64)
    divisor[1] = 1.0
    return hidden, weight, targets, divisor


def fused_logprobs(*given: Any) -> tuple[Tensor, Tensor]:
    from skyrl_train.models import fused_logprobs as module  # only where TRITON_INTERPRET is set

    return module.fused_logprobs(*given)


def eager_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, transform: LogitTransform, rows: int
) -> tuple[Tensor, Tensor]:
    return sampled_logprobs(hidden, weight, None, targets, temperature, transform, rows, compute_entropy=True)


def outcome(function: Any, given: tuple[Tensor, ...], loss: tuple[float, float], *options: Any) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of hidden states and weight."""
    hidden, weight = (x.detach().requires_grad_() for x in given[:2])
    logprobs, entropy = function(hidden, weight, *given[2:], *options)
    weights = torch.linspace(-1, 1, ROWS, dtype=logprobs.dtype)
    parts = [part for part, coef in ((logprobs * weights * loss[0], loss[0]), (entropy * loss[1], loss[1])) if coef]
    return [logprobs, entropy, *torch.autograd.grad(sum(part.sum() for part in parts), (hidden, weight))]


def deviations(case: str) -> dict[str, float]:
    size, kind, chunks, part = case.split(" / ")
    shape, (rows, kept), loss = SHAPES[kind], CHUNKS[chunks], LOSSES[part]
    hidden, weight, targets, divisor = inputs(VOCABULARIES[size])
    exact = outcome(eager_logprobs, (hidden, weight, targets, divisor), loss, shape, rows)
    got = outcome(fused_logprobs, (hidden.float(), weight.float(), targets, divisor), loss, shape, rows, kept)
    assert all(x.dtype == torch.float32 for x in got)
    names = ("logprobs", "entropy", "d_hidden", "d_weight")
    return {name: float((a - b).detach().abs().max()) for name, a, b in zip(names, exact, got, strict=True)}


def half_precision() -> dict[str, float]:
    """The same, relative, for products of bfloat16: against the eager passes in bfloat16, which round the logits."""
    hidden, weight, targets, divisor = inputs(9001)
    low = hidden.bfloat16(), weight.bfloat16()
    loss, options = LOSSES["both"], (LogitTransform(), 3)
    exact = outcome(eager_logprobs, (*(x.double() for x in low), targets, divisor), loss, *options)
    eager = outcome(eager_logprobs, (*low, targets, divisor), loss, *options)
    fused = outcome(fused_logprobs, (*low, targets, divisor), loss, *options)
    errors = [
        [float((x - y).detach().norm() / y.norm()) for x, y in zip(way, exact, strict=True)] for way in (eager, fused)
    ]
    return {"worst": max(fused / max(eager, 1e-3) for eager, fused in zip(*errors, strict=True))}


def extremes() -> dict[str, bool]:
    """Logits of any size, and a vocabulary of which a part is masked."""
    hidden, weight, targets, divisor = inputs(9001)
    given = (hidden * 1e4).float(), weight.float(), targets, divisor
    large = outcome(fused_logprobs, given, (1.0, 1.0), LogitTransform(), 3)
    equal = fused_logprobs(torch.zeros(ROWS, SIZE), weight.float(), targets, divisor, LogitTransform(), 3)
    level = torch.tensor(9001.0).log().expand(ROWS)
    return {
        "large": all(bool(torch.isfinite(x).all()) for x in large),
        "equal": torch.allclose(equal[0], -level) and torch.allclose(equal[1], level),
    }


def saved() -> dict[str, list[list[int]]]:
    """Shapes of the tensors of logits kept for backward, with and without gradient."""
    hidden, weight, targets, divisor = inputs(11)
    shapes: list[list[int]] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(list(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        fused_logprobs(hidden.float().requires_grad_(), weight.float(), targets, divisor, LogitTransform(), 3, 2)
    return {"logits": [shape for shape in shapes if shape[1:] == [11]]}


if __name__ == "__main__":
    found = {case: deviations(case) for case in CASES}
    rest = {"half": half_precision(), "extremes": extremes(), "saved": saved()}
    print(json.dumps({**found, **rest}))
