"""The samplers of all three engines with the same logits and seeds, in batches that requests join and leave.

`python -m tests.support.sampler_runs vllm|sglang` prints the samples of that engine in the form of `sampled_by_rows`,
which returns those of the transformers engine. For vLLM it also prints the number of operations of a step.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.token_sampler import RowSampler, SampledTokens

VOCABULARY = 700
SAMPLING_OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
]
SEEDS = (0, 7, 2**63 - 1, 2**63, 2**64 - 1)
REQUESTS = [
    SampleRequest(f"{index}.{number}", to_token_array((1, 2, 3)), SamplingParams(max_tokens=99, **options), seed)
    for number, seed in enumerate(SEEDS)
    for index, options in enumerate(SAMPLING_OPTIONS)
]
STEPS = 40
"""Number of tokens, more than the sampler generates random numbers for at once."""
ReportedTokens = dict[str, list[tuple[int, float, float]]]
"""The id and both log-probs of every token, by request."""
Plan = list[tuple[frozenset[int], frozenset[int]]]
"""For every step, the requests in the batch, and those that are in a prefill and sample no token."""


def logits_of(index: int, generated: int) -> Tensor:
    """Return logits [V] in float32 with many ties, which depend on the request and its number of tokens."""
    generator = torch.Generator().manual_seed(1000 * index + generated)
    return (torch.randn(VOCABULARY, generator=generator) * 8).round() / 4


def plans() -> dict[str, Plan]:
    """Return plans in which every request gets `STEPS` tokens: alone, with all others, and with changing others."""
    count, none = len(REQUESTS), frozenset[int]()
    alone = [(frozenset([index]), none) for index in range(0, count, 3) for _ in range(STEPS)]
    starts = [3 * (index * 7 % count) for index in range(count)]
    staggered = []
    for step in range(max(starts) + STEPS + 1):
        present = frozenset(index for index, start in enumerate(starts) if 0 <= step - start <= STEPS)
        staggered.append((present, frozenset(index for index in present if step == starts[index])))
    return {"alone": alone, "together": [(frozenset(range(count)), none)] * STEPS, "staggered": staggered}


class Batch:
    """An engine's sampler and its batch. Requests are identified by their index in `REQUESTS`."""

    def join(self, index: int) -> None:
        raise NotImplementedError

    def leave(self, index: int) -> None:
        raise NotImplementedError

    def order(self) -> list[int]:
        """Return the requests in the rows of the batch."""
        raise NotImplementedError

    def sample(self, logits: Tensor, prefilling: frozenset[int]) -> list[tuple[int, float, float]]:
        raise NotImplementedError


def run(make: Callable[[], Batch], plan: Plan) -> ReportedTokens:
    batch, samples, present = make(), defaultdict[str, list[Any]](list), frozenset[int]()
    for members, prefilling in plan:
        for index in sorted(present - members):
            batch.leave(index)
        for index in sorted(members - present):
            batch.join(index)
        present, order = members, batch.order()
        logits = torch.stack([logits_of(index, len(samples[REQUESTS[index].request_id])) for index in order])
        for index, token in zip(order, batch.sample(logits, prefilling), strict=True):
            if index not in prefilling:
                samples[REQUESTS[index].request_id].append(token)
    return {name: tokens for name, tokens in samples.items() if tokens}


def run_all(make: Callable[[], Batch]) -> dict[str, ReportedTokens]:
    return {name: run(make, plan) for name, plan in plans().items()}


class RowBatch(Batch):
    """The sampler of the transformers engine."""

    def __init__(self) -> None:
        self._generated: dict[int, int] = {}
        self._sampler: RowSampler | None = None

    def join(self, index: int) -> None:
        self._generated[index], self._sampler = 0, None

    def leave(self, index: int) -> None:
        del self._generated[index]
        self._sampler = None

    def order(self) -> list[int]:
        return list(self._generated)

    def sample(self, logits: Tensor, prefilling: frozenset[int]) -> list[tuple[int, float, float]]:
        rows = [row for row, index in enumerate(self.order()) if index not in prefilling]
        indices = [self.order()[row] for row in rows]
        if self._sampler is None or prefilling:
            params, seeds = [REQUESTS[i].sampling for i in indices], [REQUESTS[i].seed for i in indices]
            generated = [self._generated[index] for index in indices]
            self._sampler = RowSampler(params, seeds, generated, torch.device("cpu")) if indices else None
        tokens = [(0, 0.0, 0.0)] * len(logits)
        if self._sampler is not None:
            for row, token in zip(rows, _to_rows(self._sampler(logits[rows])), strict=True):
                tokens[row] = token
        for index in indices:
            self._generated[index] += 1
        if prefilling:
            self._sampler = None
        return tokens


def _to_rows(sampled: SampledTokens) -> list[tuple[int, float, float]]:
    columns = (sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.full_logprobs.tolist())
    return list(zip(*columns, strict=True))


def sampled_by_rows() -> dict[str, ReportedTokens]:
    return run_all(RowBatch)


class SGLangBatch(Batch):
    """SGLang's batches. A request in its prefill is a separate batch that joins the others with its first token."""

    def __init__(self) -> None:
        from skyrl_train.engines.sglang import sampler as module

        self._module = module
        self._info: Any = None
        self._batch: Any = None
        self._indices: list[int] = []

    def join(self, index: int) -> None:
        custom = self._module.to_sglang_params(REQUESTS[index], 99, frozenset())["custom_params"]
        ids, params = array("i", [1, 2, 3]), SimpleNamespace(custom_params=custom)
        given = {"sampling_params": params, "return_sampling_mask": True, "return_logprob": False}
        req = SimpleNamespace(origin_input_ids=ids, output_ids=[], **given)
        info: Any = SimpleNamespace(device="cpu")
        self._module._on_create_batch(info, SimpleNamespace(reqs=[req]), VOCABULARY)
        if self._indices:
            self._module._on_merge_batch(self._info, info)
        else:
            self._info = info
        self._indices = [*self._indices, index]

    def leave(self, index: int) -> None:
        keep = [row for row, member in enumerate(self._indices) if member != index]
        self._module._on_filter_batch(self._info, keep, torch.tensor(keep))
        self._indices = [self._indices[row] for row in keep]

    def order(self) -> list[int]:
        return self._indices

    def sample(self, logits: Tensor, prefilling: frozenset[int]) -> list[tuple[int, float, float]]:
        info, keep = self._info, [row for row, index in enumerate(self._indices) if index not in prefilling]
        if prefilling:
            info = SimpleNamespace(device="cpu", custom_params=info.custom_params)
            self._module._on_filter_batch(info, keep, torch.tensor(keep))
        tokens = [(0, 0.0, 0.0)] * len(logits)
        if keep:
            if self._batch is None or self._batch.rows is not info.custom_params:
                self._batch = self._module._Batch(info.custom_params, torch.device("cpu"))
            output: Any = SimpleNamespace()
            ids = self._batch.sample(logits[keep], output).tolist()
            columns = (output.sampling_mask_output.selected_logprobs, output.next_token_logprobs)
            for row, *token in zip(keep, ids, *(column.tolist() for column in columns), strict=True):
                tokens[row] = tuple(token)
        return tokens


class Runner(SimpleNamespace):
    """The attributes of vLLM's model runner that the sampler reads. Unlike its base class, it has weak references."""


class VLLMBatch(Batch):
    """vLLM's InputBatch, which reports changes to its logits processors and thereby to our sampler."""

    def __init__(self, rows: int = len(REQUESTS), vocabulary: int = VOCABULARY) -> None:
        from vllm.config import VllmConfig
        from vllm.v1.sample.logits_processor import build_logitsprocs
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.worker.gpu_input_batch import InputBatch

        from skyrl_train.engines.vllm.sampler import replace_sampler

        config, device = VllmConfig(), torch.device("cpu")
        config.scheduler_config.max_num_seqs = rows
        processors = build_logitsprocs(config, device, False, False)
        self.batch = InputBatch(rows, 256, 256, device, vocabulary, [16], [16], processors)
        self.own = Sampler("processed_logprobs")
        self.runner = Runner(device=device, input_batch=self.batch, sampler=self.own, speculative_config=None)
        replace_sampler(self.runner, "vllm")
        self.outputs: dict[str, list[int]] = {}

    def join(self, index: int) -> None:
        from skyrl_train.engines.vllm.arguments import sampling_params

        self.add(str(index), sampling_params(REQUESTS[index]))

    def add(self, name: str, params: Any, generator: torch.Generator | None = None) -> None:
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        self.outputs[name] = []
        self.batch.add_request(
            CachedRequestState(name, [1, 2, 3], [], params, generator, ([0],), 0, self.outputs[name])
        )

    def leave(self, index: int) -> None:
        self.batch.remove_request(str(index))

    def order(self) -> list[int]:
        self.refresh()
        return [int(name) for name in self.batch.req_ids]

    def sample(self, logits: Tensor, prefilling: frozenset[int]) -> list[tuple[int, float, float]]:
        output = self.runner.sampler(logits, self.batch.sampling_metadata)
        for name in self.batch.req_ids:
            if int(name) not in prefilling:
                self.outputs[name].append(-1)  # the placeholder of async scheduling for an unknown token
        ids, logprobs = output.sampled_token_ids.flatten().tolist(), output.logprobs_tensors.logprobs.tolist()
        return [(token, *columns) for token, columns in zip(ids, logprobs, strict=True)]

    def refresh(self) -> None:
        """Prepare the batch for a step, as vLLM's model runner does."""
        self.batch.condense()
        self.batch.refresh_metadata()


class OperationCounter(TorchDispatchMode):
    """A counter of operations that would be kernels on an accelerator, which views are not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_operations(rows: int, params: Sequence[Any], generators: bool = False) -> list[int]:
    """Return the number of operations of each of 40 steps of an unchanged batch, without its first step.

    Args:
        rows: Number of rows of the batch.
        params: Sampling parameters of the rows, in turn.
        generators: True to use vLLM's own sampler, with one generator per row.
    """
    batch, logits = VLLMBatch(rows), torch.stack([logits_of(0, 0)] * rows)
    for row in range(rows):
        generator = torch.Generator().manual_seed(row) if generators else None
        batch.add(str(row), params[row % len(params)], generator)
    if generators:
        batch.runner.sampler = batch.own
    totals = []
    with torch.inference_mode():
        for _ in range(STEPS + 1):
            with OperationCounter() as counter:
                batch.refresh()
                batch.runner.sampler(logits.clone(), batch.batch.sampling_metadata)
            totals.append(counter.counts.total())
            for output in batch.outputs.values():
                output.append(-1)
    return totals[1:]


def _vllm_output() -> Iterator[tuple[str, Any]]:
    from vllm import SamplingParams as VLLMParams

    from skyrl_train.engines.vllm.arguments import sampling_params

    yield "samples", run_all(VLLMBatch)
    plain = [sampling_params(request) for request in REQUESTS[:1]]
    mixed = [sampling_params(request) for request in REQUESTS[: len(SAMPLING_OPTIONS)]]
    own = [VLLMParams(seed=1, logprobs=0)]
    for name, params, generators in (("plain", plain, False), ("mixed", mixed, False), ("vLLM's own", own, True)):
        sizes = (len(SAMPLING_OPTIONS), 256) if name == "mixed" else (4, 256)
        yield name, [count_operations(rows, params, generators) for rows in sizes]


if __name__ == "__main__":
    engine = sys.argv[1]
    print(json.dumps(dict(_vllm_output()) if engine == "vllm" else {"samples": run_all(SGLangBatch)}))
