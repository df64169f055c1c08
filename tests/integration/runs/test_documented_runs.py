"""Every command of the documentation that starts a run, unchanged but small: one step, on this machine.

`SMALL` and the command's entry of `MORE` are appended; all other keys of the run must be those of the page.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from skyrl_train.cluster.addresses import free_address
from skyrl_train.config.keys import canonical_key
from skyrl_train.entrypoints import cli
from skyrl_train.listeners import API_KEY_ENV
from skyrl_train.testing.tiny_models import save_tiny_model, save_tiny_reward_model
from tests.support.doc_pages import REPOSITORY, Command, fenced_blocks, find_commands
from tests.support.native_servers import end
from tests.support.serve_process import serving
from tests.unit.environments.integrations.test_openenv import Server

from .conftest import ONE_PROCESS, flat, metrics_of

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "6 * 3?"}],
    "reward_spec": {"method": "rule", "ground_truth": "18"},
}
SMALL = [
    "trainer.max_steps=1",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4",
    "trainer.max_tokens_per_microbatch=2048",
    "trainer.max_prompt_length=1024",
    "trainer.logger=console",
    "trainer.ckpt_interval=0",
    "trainer.eval_interval=0",
    "trainer.eval_before_train=false",
    "generator.n_samples_per_prompt=2",
    "generator.sampling_params.max_generate_length=8",
    "generator.max_num_seqs=8",
    ONE_PROCESS,
]
TWO_RANKS = "trainer.placement.policy_num_gpus_per_node=2"
PLACEHOLDERS = ("key=value", "...")
MORE: dict[str, list[str]] = {
    "trainer.reward.model.path": ["trainer.reward.model.path={models}/reward"],
    "Qwen3-30B-A3B": [
        "trainer.policy.model.path={models}/qwen3_moe",
        *(TWO_RANKS, "trainer.policy.expert_parallel_size=2", "trainer.ref.expert_parallel_size=2"),
    ],
    "mini_swe": ["generator.max_input_length=1024", "generator.max_turns=2"],
}
"""A word of a command -> further overrides that make it small."""
NOT_HERE = {
    r"skyrl-train train '?trainer\.plugins=\[my_envs\]": "test_your_environment.py runs it",
    "skyrl-train train --config-dir runs/quickstart": "quickstart/test_recipes.py runs it after a quickstart",
    r"skyrl-train train '?trainer\.plugins=\[(my_rewards|my_tools)\]": "test_guide_pages.py runs it",
    "skyrl-train generate ": "test_guide_pages.py runs it",
    r"skyrl-train train '?trainer\.logger=\[tensorboard,mlflow\]": (
        "mlflow needs a separate environment: test_tracker_libraries.py trains with it"
    ),
    "skyrl-train train .*--config-name mini_swe_agent": "test_mini_swe_agent.py runs its agent, which it installs",
    r"python -m integrations\.verifiers": "verifiers pins other versions of shared dependencies",
    r"python -m skyrl_train\.entrypoints\.main_base '?data\.train_data=\S*s3:": "test_storage.py runs it",
}
"""Commands that this file does not run -> why."""
RUNS = [
    command
    for command in find_commands(
        r"python -m (skyrl_train\.entrypoints|(examples|integrations)\.\S+)\.main_|skyrl-train (train|sft|generate) "
    )
    if not {"--help", "--cfg"} & set(command.words) and not any(re.match(start, str(command)) for start in NOT_HERE)
]


def test_excluded_commands_are_still_documented():
    assert [start for start in NOT_HERE if not find_commands(start)] == []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's home and working folder with models, `examples`, and rows where the pages have them."""
    folder = tmp_path_factory.mktemp("home")
    rows = datasets.Dataset.from_list([ROW] * 8)
    (folder / "data" / "gsm8k").mkdir(parents=True)
    for split in ("train", "validation"):
        rows.to_parquet(folder / "data" / "gsm8k" / f"{split}.parquet")
    rows.to_json(folder / "prompts.jsonl")
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    for kind in ("qwen3", "qwen3_moe"):  # vLLM supports the size of their heads on a CPU
        save_tiny_model(folder / "models" / kind, kind)
    save_tiny_reward_model(folder / "models" / "reward")
    return folder


def start(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command in this process, over the existing Ray. It must succeed."""
    main, arguments = cli.main, words[1:]
    if words[0] == "python":
        main, arguments = importlib.import_module(words[2]).main, words[3:]
    monkeypatch.setattr(sys, "argv", [words[0], *arguments])
    code: object = 0
    try:
        main()
    except SystemExit as exit:
        code = exit.code or 0
    assert code == 0, f"exit status {code}: {' '.join(words)}"


def check_needs(command: Command) -> None:
    for library in ("vllm", "deepspeed"):
        if library in str(command) and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: scripts/cpu_engines does")
    if "mini_swe" in str(command) and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS, ids=str)
def test_documented_command_trains(
    command: Command, home: Path, ray_of_all_runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    check_needs(command)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv(API_KEY_ENV, "a-token-of-the-tests")
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    if "mini_swe" in command.words:
        for dataset_command in find_commands(r"python -m examples\.mini_swe_agent\.mini_swe_dataset"):
            start([os.path.expandvars(word) for word in dataset_command.words], monkeypatch)
    appended = [f"trainer.policy.model.path={home}/models/qwen3", *SMALL]
    for word, more in MORE.items():
        appended += [override.format(models=home / "models") for override in more if word in str(command)]
    appended += [f"trainer.ckpt_path={tmp_path / 'ckpts'}", f"trainer.export_path={tmp_path / 'exports'}"]
    with elsewhere(command, home / "models" / "qwen3", tmp_path) as addresses:
        replacements = addresses | {"/shared": str(home), "/tmp/weights": str(tmp_path / "weights")}
        words = [_localize(word, replacements) for word in command.words if word not in PLACEHOLDERS]
        start([*words, *appended], monkeypatch)
    (row,) = (values for step, values in metrics_of(tmp_path).items() if step == 1)
    assert row["policy/optimizer_steps"] >= 1 and row["rollouts/failed"] == 0
    assert_values_of_page(words, appended, tmp_path / "ckpts" / "config.yaml")


def _localize(word: str, replacements: Mapping[str, str]) -> str:
    """Return a word of a page with expanded variables and with the test's machines and folders."""
    for original, local in replacements.items():
        word = word.replace(original, local)
    return os.path.expandvars(word)


def assert_values_of_page(words: Sequence[str], appended: Sequence[str], file: Path) -> None:
    """Check that the run had the values of the page, except for appended keys."""
    saved = flat(yaml.safe_load(file.read_text()))
    appended_keys = {override.partition("=")[0] for override in appended}
    for key, _, value in (word.partition("=") for word in words if "=" in word and not word.startswith("--")):
        key = canonical_key(key.lstrip("+"))
        if key not in appended_keys:
            assert str(saved[key]) == str(_parsed(value)), key


def _parsed(value: str) -> Any:
    try:
        return float(value) if "e-" in value else yaml.safe_load(value)
    except ValueError:
        return value


@contextmanager
def elsewhere(command: Command, model: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Start the servers that a command names, with the commands of their pages.

    Yields their addresses in the command -> the addresses on this machine.
    """
    with ExitStack() as stack:
        addresses: dict[str, str] = {}
        for word in command.words:
            if word.startswith("generator.remote_inference_engine_urls="):
                native = "generator.backend=vllm" in command.words
                for address in yaml.safe_load(word.partition("=")[2]):
                    addresses[address] = stack.enter_context(vllm_server(model, folder) if native else served(model))
            if "openenv.base_url=" in word:
                server = Server()
                stack.callback(server.close)
                addresses["127.0.0.1:8000"] = f"127.0.0.1:{server.port}"
        yield addresses


@contextmanager
def served(model: Path) -> Iterator[str]:
    """Start an engine for other machines with the command of docs/guides/serving.md; yield its address."""
    (command,) = find_commands(r"python -m skyrl_train\.entrypoints\.serve .*http_endpoint_host")
    port = free_address()[1]
    own = ["generator.http_endpoint_host=127.0.0.1", f"generator.http_endpoint_port={port}"]
    words = [sys.executable, *command.words[1:], f"trainer.policy.model.path={model}", *own]
    with serving(words):
        yield f"127.0.0.1:{port}"


@contextmanager
def vllm_server(model: Path, folder: Path) -> Iterator[str]:
    """Start vLLM's own server with the command of docs/concepts/engines.md; yield its address."""
    (block,) = (text for _, text in fenced_blocks("bash") if "vllm.entrypoints" in text)
    port = free_address()[1]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            ["bash", "-c", block.replace("--port 8001", f"--port {port}")],
            stdout=log,
            stderr=log,
            env=os.environ | {"MODEL": str(model), "PATH": programs},
        )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        end(server)
