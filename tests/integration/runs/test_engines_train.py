"""Every engine in every placement trains through the real entrypoint, and every sync is verified by log-probs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model

from .conftest import Run, metrics_of


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A qwen3 with heads of size 32, which both engines require on a CPU."""
    return str(save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "colocated", "engines", "lora"),
    [
        ("vllm", False, 2, "adapter"),
        ("sglang", True, 1, "merged"),
        # The rows above have each value of each column once.
        pytest.param("vllm", True, 1, None, marks=pytest.mark.on_demand),
        pytest.param("vllm", True, 2, "merged", marks=pytest.mark.on_demand),
        pytest.param("vllm", False, 1, None, marks=pytest.mark.on_demand),
        pytest.param("sglang", True, 2, None, marks=pytest.mark.on_demand),
        pytest.param("sglang", False, 1, "merged", marks=pytest.mark.on_demand),
        pytest.param("sglang", False, 2, None, marks=pytest.mark.on_demand),
    ],
)
def test_three_steps_with_probed_weights(
    run: Run,
    small: Callable[[Path], list[str]],
    model: str,
    tmp_path: Path,
    backend: str,
    colocated: bool,
    engines: int,
    lora: str | None,
):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: scripts/cpu_engines does")
    adapters = ["rank=8", "alpha=16", f"sync={lora}"] if lora else []
    run(
        "main_base",
        *small(tmp_path),
        *(f"trainer.policy.model.lora.{setting}" for setting in adapters),
        f"trainer.policy.model.path={model}",
        f"generator.backend={backend}",
        f"trainer.placement.colocate_all={str(colocated).lower()}",
        f"generator.async_engine={str(colocated == (engines == 1)).lower()}",  # a key of SkyRL without effect
        f"generator.num_inference_engines={engines}",
        "generator.weight_sync_check=probe",
        "generator.max_num_seqs=16",
        "+generator.engine_init_kwargs.max_model_len=512",
        "trainer.eval_before_train=false",
        "trainer.max_steps=3",
    )
    rows = metrics_of(tmp_path)
    assert set(rows) == {0, 1, 2, 3}
    for step in sorted(rows)[1:]:
        values = rows[step]
        assert values["weights/version"] == step
        assert values["weights/probe_gap"] <= 1e-4
        assert values["rollout/logprob_diff_max"] <= 1e-4
        assert values["rollouts/trajectories"] == 16
        assert values["rollouts/failed"] == 0


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(("backend", "ranks"), [("vllm", 1), ("vllm", 2), ("transformers", 1), ("sglang", 1)])
def test_sending_only_changes_keeps_run_bitwise_equal(
    run: Run, small: Callable[[Path], list[str]], model: str, tmp_path: Path, backend: str, ranks: int
):
    if backend != "transformers" and importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: scripts/cpu_engines does")
    steps = {}
    for only_changed in ("false", "true"):
        run(
            "main_base",
            *small(tmp_path / only_changed),
            f"trainer.policy.model.path={model}",
            "trainer.policy.optimizer_config.lr=1e-10",  # larger steps change all elements in float32
            "trainer.algorithm.use_entropy_loss=true",  # a gradient even if all rewards are 0
            f"generator.backend={backend}",
            f"generator.inference_engine_tensor_parallel_size={ranks}",
            "generator.model_dtype=bfloat16",
            f"generator.weight_sync_only_changed={only_changed}",
            *(["+generator.engine_init_kwargs.max_model_len=512"] if backend != "transformers" else []),
            "trainer.eval_before_train=false",
            "trainer.max_steps=3",
        )
        steps[only_changed] = metrics_of(tmp_path / only_changed)
    for step in range(1, 4):
        complete, part = steps["false"][step], steps["true"][step]
        assert 0 < part.pop("weights/changed") < 0.3
        assert 0 < part.pop("weights/bytes") < complete.pop("weights/bytes")
        assert part == complete
