"""LoRA adapters: training and bitwise resuming through the entrypoint. See test_engines_train.py for engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train.experiment.export import ExportRequest, export
from skyrl_train.testing.tiny_models import save_tiny_model

from .conftest import Run, metrics_of

ADAPTERS = [
    "trainer.policy.model.lora.rank=8",
    "trainer.policy.model.lora.alpha=16",
    "generator.weight_sync_check=probe",
    "trainer.algorithm.use_kl_loss=true",
    "trainer.epochs=4",
    "trainer.policy.optimizer_config.lr=1e-2",
]


@pytest.fixture
def start(run: Run, easy: Callable[[Path], list[str]], tmp_path: Path) -> Callable[..., dict[int, dict[str, Any]]]:
    """Return a function that runs in a folder below tmp_path and returns the metrics by step."""

    def start_run(name: str, *overrides: str) -> dict[int, dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir()
        run("main_base", *easy(folder), *ADAPTERS, *overrides)
        return metrics_of(folder)

    return start_run


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sync"), [pytest.param(2, "merged", marks=pytest.mark.on_demand), (2, "adapter")])
def test_adapters_train_sync_and_resume_bitwise(
    start: Callable[..., Any], tiny_model_path: str, tmp_path: Path, ranks: int, sync: str
):
    layout = [f"trainer.placement.policy_num_gpus_per_node={ranks}", f"trainer.policy.model.lora.sync={sync}"]
    rows = start("straight", *layout, "trainer.max_steps=6", "trainer.hf_save_interval=6")
    for step in range(1, 7):
        assert rows[step]["weights/probe_gap"] <= 1e-4
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4
        assert rows[step]["policy/grad_norm"] > 0
    assert rows[6]["reward/mean"] > rows[1]["reward/mean"] + 0.1

    checkpoint = tmp_path / "straight" / "ckpts" / "global_step_4"
    saved = load_file(checkpoint / "policy" / "shard_0.safetensors")
    assert all(".lora_" in name for name in saved)
    resumed = start(
        "resumed", *layout, "trainer.max_steps=6", "trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}"
    )
    for step in (5, 6):
        assert resumed[step] == rows[step]
    exported = tmp_path / "straight/exports/global_step_6/policy"
    adapter = load_file(exported / "adapter" / "adapter_model.safetensors")
    size = sum(tensor.nbytes for tensor in adapter.values())
    assert (rows[6]["weights/bytes"] == size) == (sync == "adapter")
    assert_export_equals_the_ranks_export(checkpoint.with_name("global_step_6"), exported, tmp_path)


def assert_export_equals_the_ranks_export(checkpoint: Path, exported: Path, to: Path) -> None:
    export(ExportRequest(str(checkpoint), str(to / "adapter"), adapter=True))
    adapter = load_file(to / "adapter" / "adapter_model.safetensors")
    expected = load_file(exported / "adapter" / "adapter_model.safetensors")
    assert adapter.keys() == expected.keys() and all(adapter[name].equal(expected[name]) for name in adapter)
    export(ExportRequest(str(checkpoint), str(to / "merged")))
    torch.testing.assert_close(
        load_file(to / "merged" / "model.safetensors"), load_file(exported / "model.safetensors"), rtol=1e-6, atol=1e-7
    )
    card = (to / "merged" / "README.md").read_text()
    assert "in the environment `lower_case`" in card and "LoRA adapters (rank 8, alpha 16) were trained" in card


@pytest.mark.on_demand
@pytest.mark.slow
def test_run_with_other_adapters_is_rejected(run: Run, small: Callable[[Path], list[str]], tmp_path: Path):
    overrides = [*small(tmp_path), "trainer.max_steps=1", "trainer.eval_before_train=false", "trainer.eval_interval=0"]
    run("main_base", *overrides, "trainer.policy.model.lora.rank=4")
    other = run("main_base", *overrides, "trainer.policy.model.lora.rank=8", expect=2)
    assert "holds another run: trainer.policy.model.lora.rank was 4, is 8." in other.stderr
    unknown = run(
        "main_base",
        *small(tmp_path / "b"),
        "trainer.policy.model.lora.rank=4",
        "trainer.policy.model.lora.target_modules=[q_prj]",
        expect=2,
    )
    assert "trainer.policy.model.lora.target_modules='q_prj': no linear layer" in unknown.stderr


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("qwen3_moe", ["trainer.policy.expert_parallel_size=2"]),
        ("qwen3_5_moe_text", []),
        ("gpt_oss", ["trainer.strategy=deepspeed", "trainer.policy.deepspeed_config.zero_stage=3"]),
    ],
)
def test_expert_adapters_train_and_resume_bitwise(
    start: Callable[..., Any], kind: str, strategy: list[str], tmp_path: Path
):
    model = save_tiny_model(tmp_path / "model", kind)
    layout = [
        f"trainer.policy.model.path={model}",
        "trainer.placement.policy_num_gpus_per_node=2",
        *strategy,
        "trainer.policy.model.lora.target_parameters=[gate_up_proj,down_proj]",
        "trainer.max_steps=5",
    ]
    rows = start("straight", *layout, "trainer.hf_save_interval=5")
    for step in range(1, 6):
        assert rows[step]["weights/probe_gap"] <= 1e-4
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4
        assert rows[step]["policy/grad_norm"] > 0
    checkpoint = tmp_path / "straight" / "ckpts" / "global_step_4"
    resumed = start("resumed", *layout, "trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}")
    assert resumed[5] == rows[5]
    exported = tmp_path / "straight/exports/global_step_5/policy"
    names = load_file(exported / "adapter" / "adapter_model.safetensors").keys()
    assert sum(".experts." in name for name in names) == 2 * 2 * 2
    assert_export_equals_the_ranks_export(checkpoint.with_name("global_step_5"), exported, tmp_path)
