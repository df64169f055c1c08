"""The three engines' samplers over the same logits and seeds, in batches that requests join and leave.

`python -m tests.support.sampler_runs vllm|sglang` prints what that engine's sampler said, as `sampled_by_rows` tells it
of the transformers engine's; vLLM's also counts the operations of a step.
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
WAYS: list[dict[str, Any]] = [
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
    SampleRequest(f"{way}.{number}", to_token_array((1, 2, 3)), SamplingParams(max_tokens=99, **options), seed)
    for number, seed in enumerate(SEEDS)
    for way, options in enumerate(WAYS)
]
STEPS = 40
"""More than random numbers are made for at once."""
ReportedTokens = dict[str, list[tuple[int, float, float]]]
"""By request: the id and the two log-probs of every token."""
Plan = list[tuple[frozenset[int], frozenset[int]]]
"""Of every step: which requests are in the batch, and which of these read a part of their prompt: no token of them."""


def logits_of(index: int, generated: int) -> Tensor:
    """[V] float32 with many ties, by request and number of its tokens so far."""
    generator = torch.Generator().manual_seed(1000 * index + generated)
    return (torch.randn(VOCABULARY, generator=generator) * 8).round() / 4


def plans() -> dict[str, Plan]:
    """Every request gets `STEPS` tokens: alone, beside all others, and among others that come and go."""
    count, none = len(REQUESTS), frozenset[int]()
    alone = [(frozenset([index]), none) for index in range(0, count, 3) for _ in range(STEPS)]
    starts = [3 * (index * 7 % count) for index in range(count)]
    staggered = []
    for step in range(max(starts) + STEPS + 1):
        present = frozenset(index for index, start in enumerate(starts) if 0 <= step - start <= STEPS)
        staggered.append((present, frozenset(index for index in present if step == starts[index])))
    return {"alone": alone, "together": [(frozenset(range(count)), none)] * STEPS, "staggered": staggered}


class Batch:
    """An engine's sampler; requests are named by their place in `REQUESTS`."""

    def join(self, index: int) -> None:
        raise NotImplementedError

    def leave(self, index: int) -> None:
        raise NotImplementedError

    def order(self) -> list[int]:
        """The requests in the rows of the batch."""
        raise NotImplementedError

    def sample(self, logits: Tensor, reading: frozenset[int]) -> list[tuple[int, float, float]]:
        raise NotImplementedError


def run(make: Callable[[], Batch], plan: Plan) -> ReportedTokens:
    batch, said, present = make(), defaultdict[str, list[Any]](list), frozenset[int]()
    for wanted, reading in plan:
        for index in sorted(present - wanted):
            batch.leave(index)
        for index in sorted(wanted - present):
            batch.join(index)
        present, order = wanted, batch.order()
        logits = torch.stack([logits_of(index, len(said[REQUESTS[index].request_id])) for index in order])
        for index, told in zip(order, batch.sample(logits, reading), strict=True):
            if index not in reading:
                said[REQUESTS[index].request_id].append(told)
    return {name: tokens for name, tokens in said.items() if tokens}


def run_all(make: Callable[[], Batch]) -> dict[str, ReportedTokens]:
    return {name: run(make, plan) for name, plan in plans().items()}


class RowBatch(Batch):
    """As the transformers engine uses it."""

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

    def sample(self, logits: Tensor, reading: frozenset[int]) -> list[tuple[int, float, float]]:
        rows = [row for row, index in enumerate(self.order()) if index not in reading]
        chosen = [self.order()[row] for row in rows]
        if self._sampler is None or reading:
            params, seeds = [REQUESTS[i].sampling for i in chosen], [REQUESTS[i].seed for i in chosen]
            generated = [self._generated[index] for index in chosen]
            self._sampler = RowSampler(params, seeds, generated, torch.device("cpu")) if chosen else None
        said = [(0, 0.0, 0.0)] * len(logits)
        if self._sampler is not None:
            for row, told in zip(rows, _told(self._sampler(logits[rows])), strict=True):
                said[row] = told
        for index in chosen:
            self._generated[index] += 1
        if reading:
            self._sampler = None
        return said


def _told(sampled: SampledTokens) -> list[tuple[int, float, float]]:
    columns = (sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.full_logprobs.tolist())
    return list(zip(*columns, strict=True))


def sampled_by_rows() -> dict[str, ReportedTokens]:
    return run_all(RowBatch)


class SGLangBatch(Batch):
    """A request that SGLang reads the prompt of is a batch of its own, and joins the others with its first token."""

    def __init__(self) -> None:
        from skyrl_train.engines.sglang import sampler as module

        self._module = module
        self._info: Any = None
        self._batch: Any = None
        self._indices: list[int] = []

    def join(self, index: int) -> None:
        custom = self._module.to_sglang_params(REQUESTS[index], 99, frozenset())["custom_params"]
        ids, params = array("i", [1, 2, 3]), SimpleNamespace(custom_params=custom)
        req = SimpleNamespace(sampling_params=params, origin_input_ids=ids, output_ids=[], return_sampling_mask=True)
        info: Any = SimpleNamespace(device="cpu")
        self._module._on_create_batch(info, SimpleNamespace(reqs=[req]), VOCABULARY)
        if self._indices:
            self._module._on_merge_batch(self._info, info)
        else:
            self._info = info
        self._indices = [*self._indices, index]

    def leave(self, index: int) -> None:
        keep = [row for row, one in enumerate(self._indices) if one != index]
        self._module._on_filter_batch(self._info, keep, torch.tensor(keep))
        self._indices = [self._indices[row] for row in keep]

    def order(self) -> list[int]:
        return self._indices

    def sample(self, logits: Tensor, reading: frozenset[int]) -> list[tuple[int, float, float]]:
        info, keep = self._info, [row for row, index in enumerate(self._indices) if index not in reading]
        if reading:
            info = SimpleNamespace(device="cpu", custom_params=info.custom_params)
            self._module._on_filter_batch(info, keep, torch.tensor(keep))
        said = [(0, 0.0, 0.0)] * len(logits)
        if keep:
            if self._batch is None or self._batch.rows is not info.custom_params:
                self._batch = self._module._Batch(info.custom_params, torch.device("cpu"))
            output: Any = SimpleNamespace()
            ids = self._batch.sample(logits[keep], output).tolist()
            columns = (output.sampling_mask_output.selected_logprobs, output.next_token_logprobs)
            for row, *told in zip(keep, ids, *(column.tolist() for column in columns), strict=True):
                said[row] = tuple(told)
        return said


class VLLMBatch(Batch):
    """vLLM's own batch of rows, which tells its logits processors, and so our sampler, what changes."""

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
        self.runner = SimpleNamespace(device=device, input_batch=self.batch, sampler=self.own, speculative_config=None)
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

    def sample(self, logits: Tensor, reading: frozenset[int]) -> list[tuple[int, float, float]]:
        output = self.runner.sampler(logits, self.batch.sampling_metadata)
        for name in self.batch.req_ids:
            if int(name) not in reading:
                self.outputs[name].append(-1)  # what async scheduling has there until the token is known
        ids = output.sampled_token_ids.flatten().tolist()
        return [(token, *both) for token, both in zip(ids, output.logprobs_tensors.logprobs.tolist(), strict=True)]

    def refresh(self) -> None:
        """As vLLM's runner does before a step."""
        self.batch.condense()
        self.batch.refresh_metadata()


class Operations(TorchDispatchMode):
    """Counts what would each be a kernel on an accelerator; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(rows: int, params: Sequence[Any], generators: bool = False) -> list[int]:
    """Of 40 steps of a batch without changes, after the first: vLLM's own sampler if each row has a generator."""
    batch, logits = VLLMBatch(rows), torch.stack([logits_of(0, 0)] * rows)
    for row in range(rows):
        generator = torch.Generator().manual_seed(row) if generators else None
        batch.add(str(row), params[row % len(params)], generator)
    if generators:
        batch.runner.sampler = batch.own
    found = []
    with torch.inference_mode():
        for _ in range(STEPS + 1):
            with Operations() as seen:
                batch.refresh()
                batch.runner.sampler(logits.clone(), batch.batch.sampling_metadata)
            found.append(seen.counted.total())
            for output in batch.outputs.values():
                output.append(-1)
    return found[1:]


def _of_vllm() -> Iterator[tuple[str, Any]]:
    from vllm import SamplingParams as VLLMParams

    from skyrl_train.engines.vllm.arguments import sampling_params

    yield "said", run_all(VLLMBatch)
    plain = [sampling_params(request) for request in REQUESTS[:1]]
    mixed = [sampling_params(request) for request in REQUESTS[: len(WAYS)]]
    own = [VLLMParams(seed=1, logprobs=0)]
    for name, params, generators in (("plain", plain, False), ("mixed", mixed, False), ("vLLM's own", own, True)):
        sizes = (len(WAYS), 256) if name == "mixed" else (4, 256)
        yield name, [operations(rows, params, generators) for rows in sizes]


if __name__ == "__main__":
    engine = sys.argv[1]
    print(json.dumps(dict(_of_vllm()) if engine == "vllm" else {"said": run_all(SGLangBatch)}))
