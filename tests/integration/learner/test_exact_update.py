"""Promise 1 in one table: every variant of an update has the gradient of one padded batch in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from skyrl_train.config.schema import LoraConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.learner.learner import BatchSizes, Learner, LocalWorker, WorkerGroup
from skyrl_train.metrics import Metrics
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.learner_specs import FULL_OBJECTIVE, tiny_spec, with_targets
from tests.support.padded_reference import grouped_batch, padded_scores
from tests.support.rank_processes import RankProcess
from tests.support.recording_strategies import RecordingWorker
from tests.support.tiny_adapters import fill_adapters

KINDS = ("qwen2", "qwen3", "llama", "gemma", "qwen3_moe")
STRATEGY = "tests.support.recording_strategies:Recording"
LORA = LoraConfig(rank=3, alpha=6)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Variant:
    """A way to run an update."""

    ranks: int = 1
    sizes: dict[str, Any] = field(default_factory=lambda: {"micro_train_batch_size_per_gpu": 100})
    spec: dict[str, Any] = field(default_factory=dict)
    chunk_rows: int | None = None

    @property
    def adapts(self) -> bool:
        return "lora" in self.spec


SHARED = {"share_prompt": True, "max_tokens_per_microbatch": 10_000}
VARIANTS = {
    "packed": Variant(),
    "one sequence per pass": Variant(sizes={"micro_train_batch_size_per_gpu": 1}),
    "three sequences per pass": Variant(sizes={"micro_train_batch_size_per_gpu": 3}),
    "token budget": Variant(sizes={"max_tokens_per_microbatch": 30, "share_prompt": False}),
    "shared prompts": Variant(sizes=SHARED),
    "shared prompts, token budget": Variant(sizes={"share_prompt": True, "max_tokens_per_microbatch": 30}),
    "chunked head": Variant(chunk_rows=3),
    "gradient checkpointing": Variant(sizes=SHARED, spec={"gradient_checkpointing": True}),
    "selective checkpointing": Variant(sizes=SHARED, spec={"gradient_checkpointing": "selective"}),
    "two ranks": Variant(ranks=2),
    "two ranks, shared prompts": Variant(ranks=2, sizes=SHARED),
    "two ranks, small passes": Variant(ranks=2, sizes={"micro_train_batch_size_per_gpu": 1}),
    "sequences over two ranks": Variant(ranks=2, spec={"sequence_parallel_size": 2}),
    "sequences over two ranks, shared prompts": Variant(
        2, {"share_prompt": True, "max_tokens_per_microbatch": 30}, {"sequence_parallel_size": 2}
    ),
    "sequences over two ranks, selective checkpointing": Variant(
        2, SHARED, {"sequence_parallel_size": 2, "gradient_checkpointing": "selective"}
    ),
    "layers over two ranks": Variant(ranks=2, spec={"tensor_parallel_size": 2}),
    "layers over two ranks, selective checkpointing": Variant(
        2, SHARED, {"tensor_parallel_size": 2, "gradient_checkpointing": "selective"}
    ),
    "layers over two ranks, shared prompts": Variant(
        2,
        {"share_prompt": True, "max_tokens_per_microbatch": 30},
        {"tensor_parallel_size": 2, "gradient_checkpointing": True},
    ),
    "adapters": Variant(spec={"lora": LORA}),
    "adapters, two ranks, shared prompts": Variant(2, SHARED, {"lora": LORA}),
    "adapters, sequences over two ranks": Variant(2, SHARED, {"lora": LORA, "sequence_parallel_size": 2}),
    "adapters, two ranks, selective checkpointing": Variant(
        2,
        {"share_prompt": True, "max_tokens_per_microbatch": 30},
        {"lora": LORA, "gradient_checkpointing": "selective"},
    ),
}

COMPILED = {"use_torch_compile": True}
COMPILED_VARIANTS = {
    "token budget": Variant(sizes={"max_tokens_per_microbatch": 30}, spec=COMPILED),
    "two ranks, gradient checkpointing": Variant(2, SHARED, COMPILED | {"gradient_checkpointing": True}),
    "two ranks, selective checkpointing": Variant(2, SHARED, COMPILED | {"gradient_checkpointing": "selective"}),
    "adapters, two ranks, checkpointing": Variant(2, SHARED, COMPILED | {"lora": LORA, "gradient_checkpointing": True}),
    "adapters, sequences over two ranks": Variant(2, SHARED, COMPILED | {"lora": LORA, "sequence_parallel_size": 2}),
}
"""Only one model type: others are compiled in the same way, see tests/unit/models/test_compiled_layers.py."""
GRAPHS_ONLY = "aot_eager"
"""A backend that captures, differentiates and runs graphs without generating kernels, which takes most of a minute."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_tiny_model(folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # a vLLM engine in this process sets it
        ranks = [RankProcess() for _ in range(2)]
        yield ranks
        for rank in ranks:
            rank.end()


@cache
def make_batch() -> TrainBatch:
    """Return groups of several sizes, a long and a short prompt, two prompts of equal length, and a failed episode."""
    grouped = grouped_batch([(7, [5, 9, 3]), (4, [6, 6]), (12, [4, 8, 5, 2]), (3, [10]), (4, [1, 7])])
    status = torch.ones(len(grouped), dtype=torch.bool)
    status[6] = False
    return with_targets(replace(grouped, status=status, loss_mask=grouped.loss_mask & grouped.expand_to_tokens(status)))


@cache
def padded_gradients(path: str, adapts: bool) -> dict[str, Tensor]:
    model: Any = load_causal_lm(path, dtype=torch.float32)
    if adapts:
        names = {
            name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
        }
        peft.get_peft_model(
            model, peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=sorted(names - {"lm_head"}))
        )
        fill_adapters(model)
    logprobs, entropy = padded_scores(model, make_batch())
    FULL_OBJECTIVE(make_batch(), logprobs, entropy, int(make_batch().loss_mask.sum()), Metrics()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def gradients(
    variant: Variant, path: str, processes: list[RankProcess], backend: str | None = None
) -> dict[str, Tensor]:
    strategy = STRATEGY + ("Single" if variant.ranks == 1 else "FSDP2")
    spec = tiny_spec(path, strategy=strategy, **variant.spec)
    chunk_bytes = None if variant.chunk_rows is None else variant.chunk_rows * 4 * 320
    workers: list[Any] = [LocalWorker(RecordingWorker(spec, 0, 1, chunk_bytes, backend))]
    if variant.ranks > 1:
        workers = processes[: variant.ranks]
        for rank, process in enumerate(processes):
            process.set_worker(RecordingWorker, spec, rank, variant.ranks, chunk_bytes, backend)
    group = WorkerGroup(workers, spec.parallel_size)
    learner = Learner(group, None, BatchSizes(policy_mini_batch_size=100, **variant.sizes))

    async def run() -> dict[str, Tensor]:
        await learner.setup()
        await learner.update(make_batch())
        results: dict[str, Tensor] = (await group.call_all("gradients"))[0]
        assert not spec.use_torch_compile or min(await group.call_all("graphs")) > 0
        await learner.close()
        return results

    return asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_update_gradient_equals_padded_one(
    name: str, kind: str, models: dict[str, str], processes: list[RankProcess]
) -> None:
    assert_exact(VARIANTS[name], models[kind], processes)


@pytest.mark.filterwarnings("ignore")  # torch hides its compiler's warnings only after they are raised
@pytest.mark.parametrize(
    "name",
    [name if name == "token budget" else pytest.param(name, marks=pytest.mark.on_demand) for name in COMPILED_VARIANTS],
)
def test_compiled_update_gradient_equals_padded_one(
    name: str, models: dict[str, str], processes: list[RankProcess]
) -> None:
    assert_exact(COMPILED_VARIANTS[name], models["qwen2"], processes, GRAPHS_ONLY)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_kernels_keep_the_padded_gradient(models: dict[str, str], processes: list[RankProcess]) -> None:
    torch.compiler.reset()  # otherwise graphs of the tests above would be reused
    assert_exact(COMPILED_VARIANTS["token budget"], models["qwen2"], processes)


def assert_exact(variant: Variant, path: str, processes: list[RankProcess], backend: str | None = None) -> None:
    expected = padded_gradients(path, variant.adapts)
    actual = gradients(variant, path, processes, backend)
    total_norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert actual.keys() == expected.keys()
    for parameter, gradient in expected.items():
        bound = TOLERANCE * max(float(gradient.norm()), 1e-3 * float(total_norm))
        assert float((actual[parameter] - gradient).norm()) <= bound, parameter
