"""LoRA in the transformers engine: rows of one batch with different adapters, and invalid adapter folders."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.transformers.cache import DecodeCache
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import EngineError, UnsupportedParameter
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.engine_harness import assert_logprobs
from tests.support.reference_sampler import Reference
from tests.support.tiny_adapters import TARGETS, merged, save_tiny_adapter

PROMPT = (50, 60, 70, 80, 90)
MIXER_LAYERS = {"qwen3_5_text": ("in_proj_qkv", "out_proj"), "falcon_h1": ("in_proj",)}
"""Linear layers of recurrent layers, which see the sequences of a batch in groups of equal length."""
LAYER = "base_model.model.model.layers.1.self_attn.q_proj"


@asynccontextmanager
async def _engine(model: PreTrainedModel, **adapters: str) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(copy.deepcopy(model), name="tiny")
    try:
        for name, path in adapters.items():
            await engine.load_adapter(name, path)
        yield engine
    finally:
        await engine.close()


def _request(name: str, adapter: str | None = None, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> SampleRequest:
    params = SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | sampling))
    return SampleRequest(name, to_token_array(prompt), params, seed=7, adapter=adapter)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(hidden_size=32)


# -- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gemma2", "qwen3_5_text", "falcon_h1"])
def test_rows_of_batch_use_their_own_adapters(kind: str, tmp_path: Path):
    model = tiny_model(kind, hidden_size=32)
    targets = (*TARGETS, *MIXER_LAYERS.get(kind, ()))
    folders = {
        name: save_tiny_adapter(tmp_path / name, model, targets=targets, seed=ord(name), rank=2 + ord(name) % 3)
        for name in "ab"
    }
    prompts = (PROMPT, (9,), tuple(range(20, 40)))
    requests = [
        _request(f"{adapter}.{index}.{sample}", adapter, prompt)
        for sample in range(2)
        for adapter in (None, "a", "b")
        for index, prompt in enumerate(prompts)
    ]

    async def run() -> list[Completion]:
        async with _engine(model, **folders) as engine:
            return await engine.generate(requests)

    references = {None: Reference(model)} | {name: Reference(merged(model, path)) for name, path in folders.items()}
    responses = set()
    for request, completion in zip(requests, asyncio.run(run()), strict=True):
        assert_logprobs(references[request.adapter], request, completion)
        responses.add(tuple(completion.token_ids))
    assert len(responses) == 9  # three prompts times three adapters; all seeds are equal


def test_saved_peft_adapter_matches_peft(model: PreTrainedModel, tmp_path: Path):
    config = LoraConfig(
        r=3, lora_alpha=7, target_modules=r".*\.(gate_proj|k_proj)", use_rslora=True, task_type="CAUSAL_LM"
    )
    adapted: Any = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(tmp_path)
    request = _request("r", "a")

    async def run() -> list[Completion]:
        async with _engine(model, a=str(tmp_path)) as engine:
            return await engine.generate([request])

    assert_logprobs(Reference(adapted.merge_and_unload()), request, asyncio.run(run())[0])


def test_prompt_is_prefilled_once_per_adapter(model: PreTrainedModel, tmp_path: Path):
    folder = save_tiny_adapter(tmp_path, model)
    requests = [_request(f"{adapter}.{n}", adapter) for adapter in (None, "a", "b") for n in range(3)]

    async def run() -> int:
        async with _engine(model, a=folder, b=folder) as engine:
            await engine.generate(requests)
            return (await engine.health()).prefilled_tokens

    assert asyncio.run(run()) == 3 * len(PROMPT)


def test_running_request_keeps_its_adapter(model: PreTrainedModel, tmp_path: Path):
    first, second = (save_tiny_adapter(tmp_path / str(seed), model, seed=seed) for seed in (1, 2))
    request = _request("long", "a", max_tokens=300)

    async def run() -> tuple[Completion, Completion]:
        async with _engine(model, a=first) as engine:
            call = asyncio.ensure_future(engine.generate([request]))
            while (await engine.health()).generated_tokens < 10:
                await asyncio.sleep(0.001)
            await engine.pause("retract")
            await engine.load_adapter("a", second)
            await engine.resume()
            (later,) = await engine.generate([_request("later", "a")])
            await engine.unload_adapter("a")
            return (await call)[0], later

    old, later = asyncio.run(run())
    assert_logprobs(Reference(merged(model, first)), request, old)
    assert_logprobs(Reference(merged(model, second)), _request("later"), later)


def test_adapters_do_not_change_parameter_names(model: PreTrainedModel, tmp_path: Path):
    async def run() -> list[str]:
        async with _engine(model, a=save_tiny_adapter(tmp_path, model)) as engine:
            return list(engine.served.parameters)

    assert asyncio.run(run()) == [name for name, _ in model.named_parameters()]


def test_unknown_adapter_error_lists_loaded_adapters(model: PreTrainedModel, tmp_path: Path):
    async def run() -> None:
        async with _engine(model, one=save_tiny_adapter(tmp_path, model)) as engine:
            with pytest.raises(UnsupportedParameter, match=r"'tiny' .* adapter='two': adapters loaded: one"):
                await engine.generate([_request("a"), _request("b", "two")])
            assert (await engine.health()).queued == 0
            await engine.unload_adapter("one")
            await engine.unload_adapter("one")
            with pytest.raises(UnsupportedParameter, match="adapters loaded: none"):
                await engine.generate([_request("b", "one")])

    asyncio.run(run())


# -- invalid adapter folders ------------------------------------------------------------------------------------------


def _change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return rewrite


def _new(key: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return _change_tensors(lambda tensors: tensors.update({key: tensor}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_change_config(r=0), r"r=0"),
        (_change_config(r=5), r"layers\.0\.\S+lora_A\.weight is \[4, \d+\] instead of \[5, \d+\]"),
        (_change_config(peft_type="IA3"), "peft_type is 'IA3'"),
        (_change_config(use_dora=True), "use_dora=True is not supported"),
        (_change_config(bias="all"), "bias='all' is not supported"),
        (_change_config(modules_to_save=["lm_head"]), "modules_to_save="),
        (_change_config(rank_pattern={"q_proj": 2}), "rank_pattern="),
        (_change_config(of_tomorrow=3), "of_tomorrow=3 is not supported"),
        (_change_config(target_modules=["q_proj", "k_proj"]), r"layers\.0\S+k_proj, but it has no tensors"),
        (_change_config(target_modules=["q_proj", "c_attn"]), "names 'c_attn'"),
        (_change_tensors(lambda tensors: tensors.pop(f"{LAYER}.lora_B.weight")), rf"lacks the tensor {LAYER}\.lora_B"),
        (_new(f"{LAYER}.lora_A.weight", torch.ones(4, 31)), rf"{LAYER}\.lora_A\.weight is \[4, 31\] instead"),
        (_new(f"{LAYER}.lora_B.weight", torch.full((128, 4), torch.nan)), rf"{LAYER}\.lora_B\.weight holds NaN"),
        (_new("base_model.model.lm_head.lora_A.weight", torch.ones(4, 32)), r"lm_head\.lora_A\.weight belongs to no"),
        (_new(f"{LAYER}.lora_magnitude_vector", torch.ones(4)), "lora_magnitude_vector belongs to no"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"adapter_model\.safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"{}" * 9), "cannot serve adapter 'a'"),
        (lambda folder: (folder / "adapter_config.json").write_text("["), "cannot serve adapter 'a'"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "peft_type is None"),
    ],
)  # fmt: skip
def test_invalid_adapter_folder_is_rejected(
    model: PreTrainedModel, tmp_path: Path, damage: Callable[[Path], None], message: str
):
    path = save_tiny_adapter(tmp_path, model, targets=("q_proj",))
    damage(tmp_path)

    async def run() -> None:
        async with _engine(model) as engine:
            with pytest.raises(EngineError, match=message) as caught:
                await engine.load_adapter("a", path)
            assert "'tiny'" in str(caught.value)
            assert path in str(caught.value)
            with pytest.raises(UnsupportedParameter, match="adapters loaded: none"):
                await engine.generate([_request("r", "a")])

    asyncio.run(run())


# -- retraction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [2, 64])
def test_retracted_requests_continue_with_same_tokens(model: PreTrainedModel, max_num_seqs: int):
    requests = [
        replace(_request(f"r{n}", prompt=(*PROMPT, n % 2), max_tokens=120), seed=n, group=str(n % 2)) for n in range(6)
    ]

    async def run() -> tuple[list[Completion], list[Completion]]:
        engine = TransformersEngine(copy.deepcopy(model), max_num_seqs=max_num_seqs)
        caches, decode = [], engine.served.decode

        def watched(ids: torch.Tensor, cache: DecodeCache, *others: Any) -> torch.Tensor:
            caches.append(cache)
            return decode(ids, cache, *others)

        engine.served.decode = watched  # type: ignore[method-assign,assignment]
        try:
            undisturbed = await engine.generate(requests)
            call = asyncio.ensure_future(engine.generate(requests))
            for tokens in (20, 60, 130):
                while (await engine.health()).generated_tokens < 720 + tokens:
                    await asyncio.sleep(0.001)
                await engine.pause("retract")
                health = await engine.health()
                assert (health.running, health.paused) == (0, True)
                assert health.queued >= 1
                assert not caches[-1].layers_kv
                await engine.resume()
            return undisturbed, await call
        finally:
            await engine.close()

    undisturbed, disturbed = asyncio.run(run())
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert before.versions == after.versions
        assert after.full_logprobs.tolist() == pytest.approx(before.full_logprobs.tolist(), abs=1e-4)


def test_aborted_retracted_request_returns_its_tokens(model: PreTrainedModel):
    async def run() -> Completion:
        async with _engine(model) as engine:
            call = asyncio.ensure_future(engine.generate([_request("r", max_tokens=2000)]))
            while (await engine.health()).generated_tokens < 5:
                await asyncio.sleep(0.001)
            await engine.pause("retract")
            await engine.abort(["r"])
            return (await call)[0]

    completion = asyncio.run(run())
    assert completion.stop_reason == "abort"
    assert 5 <= len(completion.token_ids) < 2000
    assert [(span.start, span.stop) for span in completion.versions] == [(0, len(completion.token_ids))]
