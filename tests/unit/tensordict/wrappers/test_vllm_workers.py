"""Workers by TorchRL's names, over the engine of this process in place of vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.wrappers import backends as wrappers, vllm_workers
from skyrl_train.tensordict.wrappers.backends import RemoteTransformersWrapper, vLLMWrapper
from skyrl_train.tensordict.wrappers.categorical import CategoricalSequential
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.vllm_workers import LLMOnDevice, make_vllm_worker, vLLMWorker
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.weight_targets import score

TOKENIZER = byte_tokenizer()
ROWS = [[5, 9, 77, 30], [8, 8, 250]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the arguments with which engines were started."""
    options: list[dict[str, Any]] = []

    def start(model: str, *, enforce_eager: bool, tensor_parallel_size: int, **rest: Any) -> TransformersEngine:
        options.append({"enforce_eager": enforce_eager, "tensor_parallel_size": tensor_parallel_size, **rest})
        return TransformersEngine(model, **rest)

    monkeypatch.setattr(vllm_workers, "load_object", lambda _: start)
    return options


@pytest.fixture
def worker(started: list[dict[str, Any]], tiny_model_path: str) -> Iterator[vLLMWorker]:
    with make_vllm_worker(model_name=tiny_model_path, make_ray_worker=False, enforce_eager=True) as made:
        yield made


def test_weights_that_arrive_one_by_one_are_served_as_one_version(worker: vLLMWorker, started: list[dict[str, Any]]):
    assert started[0]["enforce_eager"] is True
    assert started[0]["tensor_parallel_size"] == 1
    wrapper = vLLMWrapper(worker, tokenizer=TOKENIZER, input_mode="tokens", generate=False, inplace=False)
    trained = tiny_model(seed=3)
    parameters = list(trained.named_parameters())
    before = call(worker.engine.score(ROWS), "score", 60.0)
    for name, weight in parameters[:-1]:
        worker.update_weight(name, weight)
    assert call(worker.engine.score(ROWS), "score", 60.0) == before
    assert not worker.check_weights_changed()
    worker.update_weight(*parameters[-1])
    assert worker.check_weights_changed()
    out = wrapper(TensorDict(tokens=torch.tensor(ROWS[0])))
    torch.testing.assert_close(out["log_probs"].full[1:].tolist(), score(trained, ROWS)[0], atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="not a tensor of the model"):
        worker.update_weight("other.weight", torch.zeros(1))
    with pytest.raises(RuntimeError, match="init_weight_update_group"):
        worker.update_weight_broadcast(parameters[0][0], "float32", [1])


def test_what_a_worker_cannot_be_is_said_before_it_starts(started: list[dict[str, Any]], tiny_model_path: str):
    there = torch.cuda.device_count()
    for wrong in (
        {"devices": [0], "num_devices": 1},
        {"devices": [there]},
        {"devices": [-1]},
        {"num_devices": 0},
        {"enable_fp32_output": True, "dtype": "bfloat16"},
    ):
        with pytest.raises(ValueError, match=r"devices=|enable_fp32_output"):
            make_vllm_worker(model_name=tiny_model_path, make_ray_worker=False, **wrong)  # type: ignore[arg-type]
    assert started == []
    if not Cluster().is_connected:
        with pytest.raises(RuntimeError, match="Ray is not started"):
            make_vllm_worker(model_name=tiny_model_path)
    with pytest.raises(RuntimeError, match="not started"):
        _ = LLMOnDevice(tiny_model_path).engine


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody had chosen accelerators in this process, which sees two of them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    vllm_workers.accelerators.cache_clear()
    yield
    vllm_workers.accelerators.cache_clear()


def test_devices_count_those_that_were_visible_at_first(no_choice: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    for chosen, visible in (([0], "4,5"), ([1], "5"), ([0], "4"), ([1, 0], "5,4")):
        vllm_workers.choose_devices(vllm_workers.check_devices(chosen))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="torch already uses other accelerators"):
        vllm_workers.choose_devices([0])


class _Placed(Exception):
    pass


@pytest.mark.parametrize(
    ("options", "devices", "reserved", "ends"),
    [
        ({"device": "cpu"}, None, ("cpu", 1), _Placed),
        ({}, None, ("cuda", 1), _Placed),
        ({"device": None}, ["7"], ("cuda", 1), _Placed),
        ({}, ["5"], ("cuda", 1), ConfigError),
    ],
)
def test_an_actor_has_the_accelerators_that_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], devices: Any, reserved: Any, ends: type[Exception]
):
    from skyrl_train.tensordict.wrappers import ray_engine as remote

    asked = []

    class OneAccelerator:
        is_connected, num_gpus = True, 1.0

        def connect(self) -> None: ...

        def __exit__(self, *failure: object) -> None: ...

    async def places(slots: Any, indices: Any, deadline_s: float) -> list[tuple[str, str]]:
        return [("node", "7")]

    def spawned(*args: Any, **settings: Any) -> None:
        assert args[2]["device"] == reserved[0]
        raise _Placed

    monkeypatch.setattr(remote, "Cluster", OneAccelerator)
    monkeypatch.setattr(
        remote, "reserve_pool", lambda cluster, **given: asked.append((given["device"], given["count"]))
    )
    monkeypatch.setattr(remote, "locate_gpus", places)
    monkeypatch.setattr(remote, "spawn", spawned)
    with pytest.raises(ends, match="devices=5, but Ray has given it 7" if ends is ConfigError else None):
        remote.engine_in_actor("a:B", options, name="worker", devices=devices)
    assert asked == [reserved]


@pytest.mark.defect("D21")
def test_properties_of_a_remote_wrapper_are_values(monkeypatch: pytest.MonkeyPatch, tiny_model_path: str):
    from skyrl_train.tensordict.wrappers import ray_engine as remote

    ended = []

    def here(target: str, options: dict[str, Any], *, name: str, start_ray: bool) -> Any:
        assert target.endswith(":TransformersEngine")
        assert (options["max_num_seqs"], options["threads"], start_ray) == (4, 1, True)
        return TransformersEngine(**options), lambda: ended.append(name)

    monkeypatch.setattr(remote, "engine_in_actor", here)
    wrapper = RemoteTransformersWrapper(tiny_model_path, 4, actor_name="far", input_mode="text", inplace=False)
    scorer = wrapper.get_new_version(generate=False)
    assert (wrapper.in_keys, scorer.in_keys) == ([("text", "prompt")], [("text", "full")])
    assert wrapper.out_keys == ["text", "masks", "tokens", "log_probs"]
    assert wrapper.log_prob_keys[0] == ("log_probs", "response")
    assert (wrapper.generate, wrapper.pad_output, wrapper.collector) == (True, False, None)
    assert wrapper.get_batching_state() == {"batching_enabled": False}
    assert scorer.engine is wrapper.engine
    wrapper.close()
    scorer.close()
    assert ended == ["far"]
    for wrong in ({"model": 3}, {"model": tiny_model_path, "max_concurrency": 0}):
        with pytest.raises(ConfigError):
            wrappers.RemoteTransformersWrapper(**wrong)


@pytest.mark.defect("D15")
def test_logits_of_a_module_make_a_distribution_over_positions():
    logits = torch.tensor([[[0.0, 0.0, 2.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])  # the last one is padding
    policy = CategoricalSequential(lambda td: td.set("logits", logits))
    td = TensorDict(tokens_response=torch.tensor([[2, 1, 0]]), batch_size=(1,))
    expected = logits.log_softmax(-1)
    found = policy.log_prob(td)
    torch.testing.assert_close(found, torch.stack([expected[0, 0, 2], expected[0, 1, 1], torch.tensor(0.0)])[None])
    assert policy.get_dist(td).sample().tolist()[0][2] == -100
    assert "logits" not in td.keys()  # noqa: SIM118 - a tensordict
    with pytest.raises(ConfigError, match="logits_key"):
        CategoricalSequential(lambda td: td).get_dist(td)
