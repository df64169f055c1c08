from __future__ import annotations

import threading

import pytest

from skyrl_train.assembly.environments import check_environments
from skyrl_train.config.hydra import load
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.data.trajectory import Prompt
from skyrl_train.environments.registry import environments
from skyrl_train.errors import ConfigError


def rows(*env_classes: str) -> PromptDataset:
    message = {"role": "user", "content": "1 + 1"}
    extras = {"reward_spec": {"method": "rule", "ground_truth": "2"}}
    return PromptDataset(
        tuple(Prompt(str(i), [message], name, extras, "source") for i, name in enumerate(env_classes)), 0
    )


def test_rows_that_name_their_environment_go_before_the_key_and_that_is_said_once(capsys: pytest.CaptureFixture[str]):
    train, evaluation = rows("arithmetic", "arithmetic", "gsm8k", "multiply"), rows("arithmetic")
    check_environments(load(["environment.env_class=gsm8k"]), train, evaluation)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "note: 4 of 5 rows name their env_class themselves (arithmetic 3, multiply 1), which counts; "
        "environment.env_class (gsm8k) is for rows that name none."
    )


def test_rows_of_an_environment_of_the_program_that_cannot_be_sent_are_refused():
    lock = threading.Lock()
    environments.register("drivers_own")(lambda env_config, extras: lock)
    try:
        with pytest.raises(
            ConfigError, match=r"env_class=drivers_own: must be registered by a module of trainer\.plug"
        ):
            check_environments(load(), rows("drivers_own"))
    finally:
        environments.forget("drivers_own")


def test_rows_that_agree_with_the_key_are_not_worth_a_word(capsys: pytest.CaptureFixture[str]):
    check_environments(load(["environment.env_class=arithmetic"]), rows("arithmetic"), None)
    assert capsys.readouterr().err == ""
