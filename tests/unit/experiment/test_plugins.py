from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.algorithms.registry import kl_estimators, reductions
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.validate import PLUGIN_KEYS
from skyrl_train.environments.registry import environments, register
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.plugins import REGISTRIES, check_plugins


@pytest.fixture
def registered() -> Iterator[None]:
    reductions.register("mine")(lambda mask, sequence_ids, group_ids, *, max_seq_len: mask)
    kl_estimators.register("mine")(lambda logprobs, ref_logprobs, mask: logprobs)
    register("mine", "somewhere:MyEnv")
    yield
    for registry in (reductions, kl_estimators, environments):
        registry.unregister("mine")


MINE = [
    "environment.env_class=mine",
    "trainer.algorithm.loss_reduction=mine",
    "trainer.algorithm.kl_estimator_type=mine",
]


def test_registered_names_are_accepted(registered: None):
    check_plugins(prepare_config([*MINE, "trainer.plugins=[json]"], has_accelerator=False).config)
    check_plugins(prepare_config(MINE[1:], has_accelerator=False, has_user_code=True).config)


def test_unpicklable_environment_of_program_is_refused(registered: None):
    check_plugins(prepare_config(MINE, has_accelerator=False, has_user_code=True).config)
    lock = threading.Lock()
    environments.unregister("mine")
    environments.register("mine")(lambda env_config, extras: lock)
    with pytest.raises(ConfigError, match=r"env_class=mine: must be .* separate processes and cannot be sent to them"):
        check_plugins(prepare_config(MINE, has_accelerator=False, has_user_code=True).config)


def test_unregistered_names_are_refused_together():
    names = [*MINE, "trainer.logger=[wandb,mine]", "trainer.algorithm.policy_loss_type=gspoo"]
    with pytest.raises(ConfigError) as refused:
        check_plugins(prepare_config(names, has_accelerator=False, has_user_code=True).config)
    text = str(refused.value)
    assert text.startswith("5 problems")
    assert "trainer.logger=mine: must be registered by a module of trainer.plugins or by your program. Known:" in text
    assert "Did you mean 'gspo'?" in text


def test_every_plugin_key_has_registry():
    assert REGISTRIES.keys() == PLUGIN_KEYS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module_at_all", "cannot be imported (No module named 'no_such_module_at_all')"),
        ("x = 1\nx.y\n", "AttributeError: 'int' object has no attribute 'y', in {file}, line 2"),
        ("x = (\n", "SyntaxError: '(' was never closed ({name}.py, line 1), in {file}, line 1"),
        (
            "from skyrl_train.environments.registry import register\nregister('gsm8k', 'my:Env')\n",
            "'{name}': environment 'gsm8k' is already registered",
        ),
    ],
    ids=["import", "mistake", "syntax", "name taken"],
)
def test_failing_plugin_import_names_file_and_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    name = f"plugin_{abs(hash(request.node.name))}"
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        check_plugins(prepare_config([f"trainer.plugins=[{name}]"], has_accelerator=False).config)
    assert f"trainer.plugins: '{name}'" in str(refused.value)
    assert message.format(file=file, name=name) in str(refused.value)
    assert name not in sys.modules
