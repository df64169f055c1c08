from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.config.hydra import BASE_PRESET
from skyrl_train.entrypoints import check_config

KEYS = Path(__file__).with_name("skyrl_keys.tsv")
HEAVY = ("torch", "ray", "transformers", "datasets", "numpy", "wandb")


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[int, str]:
    """Return the exit code and the output."""
    monkeypatch.setattr(sys, "argv", ["check_config", *argv])
    try:
        check_config.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def every_key_at_its_default() -> list[str]:
    overrides = []
    for line in KEYS.read_text().splitlines()[1:]:
        key, text = line.split("\t")
        value = None if text.startswith("$") else json.loads(text)
        if isinstance(value, str):
            text = json.dumps(value) if "$" in value or value == "" else value
        overrides.append(f"{key}={text}")
    return overrides


def test_explicit_skyrl_defaults_are_valid(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, text = run(capsys, monkeypatch, check_config.ELSEWHERE, *every_key_at_its_default())
    assert code == 0, text
    assert "config ok" in text
    assert "warning:" not in text
    assert "generator.backend" not in text  # the engine, written out, stays


def test_check_elsewhere_names_what_it_assumes_and_leaves_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    own = ("trainer.plugins=[my_game]", "environment.env_class=guess", "trainer.algorithm.policy_loss_type=soft_clip")
    code, text = run(capsys, monkeypatch, check_config.ELSEWHERE, *own)
    assert code == 0, text
    assert "not checked: environment.env_class=guess, trainer.algorithm.policy_loss_type=soft_clip." in text
    assert "Add device=cuda if the run uses GPUs." in text
    code, text = run(capsys, monkeypatch, check_config.ELSEWHERE, "device=cuda")
    assert code == 0, text
    assert [word for word in ("note:", "warning:") if word in text] == [], "a default value is not worth a warning"


BAD = {
    "unknown key": (["trainer.nonsense=1"], ["trainer.nonsense=1", "unknown key"]),
    "unknown key with plus": (["+trainer.nonsense=1"], ["trainer.nonsense=1", "unknown key"]),
    "typo": (["trainer.epcohs=20"], ["trainer.epcohs=20", "Did you mean trainer.epochs?"]),
    "NaN": (["trainer.policy.optimizer_config.lr=nan"], ["trainer.policy.optimizer_config.lr=nan", "a finite number"]),
    "negative": (["trainer.train_batch_size=-4"], ["trainer.train_batch_size=-4", "at least 1"]),
    "wrong choice": (["trainer.strategy=fsdp3"], ["trainer.strategy=fsdp3", "one of", "fsdp2"]),
    "wrong type": (["trainer.epochs=many"], ["trainer.epochs=many", "an integer"]),
    "group of one": (
        ["generator.n_samples_per_prompt=1"],
        ["generator.n_samples_per_prompt=1", "at least 2", "The default is 5"],
    ),
    "KL twice": (["trainer.algorithm.use_kl_in_reward=true"], ["use_kl_in_reward=true", "use_kl_loss=false"]),
    "gae without critic": (
        ["trainer.algorithm.advantage_estimator=gae"],
        ["trainer.critic.model.path=null", "the path of a model", "advantage_estimator=gae"],
    ),
    "two mistakes": (
        ["trainer.epcohs=20", "generator.n_samples_per_prompt=1"],
        ["2 problems", "trainer.epcohs=20", "generator.n_samples_per_prompt=1"],
    ),
}


@pytest.mark.fault("F02")
@pytest.mark.parametrize("name", BAD)
def test_invalid_configuration_exits_with_two_and_advice(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    arguments, parts = BAD[name]
    code, text = run(capsys, monkeypatch, check_config.ELSEWHERE, *arguments)
    assert code == 2
    assert [part for part in parts if part not in text] == []
    assert "config ok" not in text


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.fault("F01")
def test_process_rejects_quickly_without_heavy_imports():
    script = (
        "import sys; from skyrl_train.entrypoints.check_config import main\n"
        "try:\n    main()\nfinally:\n"
        f"    print('loaded:', *[name for name in {HEAVY} if name in sys.modules])\n"
    )
    arguments = [argument for bad, _ in BAD.values() for argument in bad]
    before = cpu_seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    seconds = cpu_seconds_of_children() - before
    assert done.returncode == 2
    assert done.stdout.strip() == "loaded:"
    assert "trainer.epcohs=20: unknown key. Did you mean trainer.epochs?" in done.stderr
    assert seconds < 6  # of processor time, which a busy neighbour's cache misses double


def test_information_flags_of_hydra_work_and_write_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "skyrl_train.entrypoints.check_config"]

    def printed(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    text = printed(
        "--cfg", "job", "--resolve", "trainer.policy.model.path=my/model", "generator.tensor_parallel_size=1"
    )
    assert text.count("my/model") == 3
    assert "tensor_parallel_size: 1" in text
    assert "Hydra" in printed("--hydra-help")
    assert "config ok" in printed("--elsewhere", f"--config-name={BASE_PRESET}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("placement", [[], ["trainer.placement.colocate_all=false"]])
def test_plan_reports_memory_of_every_role(
    placement: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from skyrl_train.testing.tiny_models import save_tiny_model

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = f"trainer.policy.model.path={save_tiny_model(tmp_path)}"
    code, text = run(capsys, monkeypatch, "--plan", "--elsewhere", model, *placement)
    assert code == 0, text
    expected_parts = [
        "config ok",
        "policy",
        "reference",
        "engine",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
    ]
    expected_parts += [
        "logits",
        "weight-sync buckets",
        "KV cache",
        "peak",
        "all slots together",
        ": fits",
        "the run",
        "tokens per step",
        "measures the seconds of a step",
    ]
    assert [part for part in expected_parts if part not in text] == []


def test_plan_for_gpus_elsewhere_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from skyrl_train.testing.tiny_models import save_tiny_model

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("skyrl_train.experiment.memory_plan.memory_capacity", lambda device: None)
    arguments = [f"trainer.policy.model.path={save_tiny_model(tmp_path)}", "device=cuda"]
    offload = "trainer.placement.colocate_offload=kv_cache"
    code, text = run(capsys, monkeypatch, "--plan", "--elsewhere", *arguments, offload)
    assert code == 0, text
    assert "on each accelerator" in text
    assert f"engines and trainer are colocated ({offload})" in text
    code, text = run(capsys, monkeypatch, "--plan", *arguments)
    assert code == 2
    assert "No NVIDIA device was found" in text


def test_plan_of_missing_model_exits_with_two(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, text = run(capsys, monkeypatch, "--plan", "--elsewhere", "trainer.policy.model.path=/no/such/model")
    assert code == 2
    assert "trainer.policy.model.path='/no/such/model' cannot be loaded" in text
    assert "config ok" not in text


def test_a_probe_elsewhere_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, text = run(capsys, monkeypatch, "--probe", "--elsewhere")
    assert code == 2
    assert "--probe --elsewhere: a probe runs on this machine" in text
    assert "config ok" not in text


def test_what_does_not_fit_is_said():
    from skyrl_train.experiment.memory_plan import MemoryItem, SlotMemoryPlan

    plan = SlotMemoryPlan("policy", 2, (MemoryItem("policy", "parameters", "", {"": 3 << 30}, exact=True),))
    on_cpu = "\n".join(check_config.plan_lines([plan], "cpu", 4 << 30, 4 << 30))
    assert "all slots together, on this machine: 6.00 of 4.00 GiB: DOES NOT FIT" in on_cpu
    on_gpu = "\n".join(check_config.plan_lines([plan], "cuda", 4 << 30, 1 << 30))
    assert "3.00 of 4.00 GiB: fits" in on_gpu


def test_cuda_plan_without_gpus_makes_no_comparison():
    from skyrl_train.experiment.memory_plan import MemoryItem, SlotMemoryPlan

    rows = [MemoryItem("policy", "parameters", "", {"": 3 << 30}, on_host=on_host) for on_host in (False, True)]
    text = "\n".join(check_config.plan_lines([SlotMemoryPlan("policy", 2, tuple(rows))], "cuda", None, 1 << 30))
    assert "policy, on each accelerator: 3.00 GiB\n" in text
    assert "host memory of all slots together: 6.00 GiB\n" in text
    assert "this machine" not in text
    assert "fit" not in text.lower()
