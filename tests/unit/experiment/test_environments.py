from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.hydra import load_preset
from skyrl_train.data.dataset import PromptDataset, load_prompts
from skyrl_train.data.messages import Prompt
from skyrl_train.environments.base import TextEnv
from skyrl_train.environments.registry import check_rows, environments
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.experiment.data import check_eval_data_sources, num_eval_answers
from skyrl_train.experiment.environments import check_environments


def rows(*env_classes: str) -> PromptDataset:
    message = {"role": "user", "content": "1 + 1"}
    extras = {"reward_spec": {"method": "rule", "ground_truth": "2"}}
    return PromptDataset(
        tuple(Prompt(str(i), [message], name, extras, "source") for i, name in enumerate(env_classes)), 0
    )


def test_unknown_data_source_of_samples_is_refused():
    cfg = load_preset(["generator.eval_n_samples_by_data_source={source: 4, aime: 32}"])
    with pytest.raises(ConfigError, match=r"by_data_source.aime=32: no row .* choose of \['source'\]"):
        check_eval_data_sources(cfg, rows("gsm8k"))
    check_eval_data_sources(cfg, None)
    assert num_eval_answers(cfg.generator, rows("gsm8k", "gsm8k")) == 8


def test_env_class_of_rows_takes_precedence(capsys: pytest.CaptureFixture[str]):
    train, evaluation = rows("arithmetic", "arithmetic", "gsm8k", "multiply"), rows("arithmetic")
    check_environments(load_preset(["environment.env_class=gsm8k"]), train, evaluation)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "note: 4 of 5 rows name their own env_class (arithmetic 3, multiply 1), which takes precedence. "
        "environment.env_class (gsm8k) applies to rows that name none. "
        "To use it for all rows, remove the column env_class from the data."
    )


def test_unpicklable_environment_of_rows_is_refused():
    lock = threading.Lock()
    environments.register("drivers_own")(lambda env_config, extras: lock)
    try:
        with pytest.raises(
            ConfigError, match=r"env_class=drivers_own: must be registered by a module of trainer\.plug"
        ):
            check_environments(load_preset(), rows("drivers_own"))
    finally:
        environments.unregister("drivers_own")


def test_rows_with_configured_environment_print_nothing(capsys: pytest.CaptureFixture[str]):
    check_environments(load_preset(["environment.env_class=arithmetic"]), rows("arithmetic"), None)
    assert capsys.readouterr().err == ""


NUMBERS = ["gsm8k", "gsm8k_multi_turn", "arithmetic", "multiply", "tool_use", "searchcode"]
MUST_BE_TEXT = [*NUMBERS, "math", "llm_as_a_judge"]
OTHERS = ["aime", "countdown", "ifeval", "lcb", "search", "text2sql"]
WRONG_TYPES: list[Any] = [None, "", " ", [], 1.5, True, [["42"]], {}]
STRUCTURED: dict[str, list[Any]] = {
    "ifeval": [{"instruction_id_list": ["no_such:instruction"], "kwargs": [{}]}],
    "lcb": ["not JSON"],
    "countdown": [{"target": 24.5, "numbers": [24]}, {"target": 24, "numbers": []}],
    "search": [{"target": [" "]}],
}


@pytest.mark.parametrize(
    ("env_class", "truth"),
    [
        *((name, truth) for name in [*MUST_BE_TEXT, *OTHERS] for truth in WRONG_TYPES),
        *((name, 42) for name in [*MUST_BE_TEXT, *OTHERS] if name != "aime"),
        *((name, "forty-two") for name in [*NUMBERS, "aime"]),
        *((name, truth) for name, truths in STRUCTURED.items() for truth in truths),
        *(("math", truth) for truth in (r"\frac{1}{", "(1,2", r"\boxed{", "{}")),
    ],
)
def test_unusable_ground_truth_names_file_and_row(tmp_path: Path, env_class: str, truth: Any):
    message = [{"role": "user", "content": "1 + 1"}]
    row = {"prompt": message, "env_class": env_class, "db_id": "farm", "reward_spec": {"ground_truth": truth}}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{json.dumps(row)}\n")

    def load_and_check() -> None:
        (prompt,) = load_prompts([str(path)], lambda messages: 1, 10, "gsm8k").prompts
        check_rows(env_class, [(prompt.where, prompt.env_extras)])

    with pytest.raises(DataError, match=rf"{path}, line 2: "):
        load_and_check()


def test_run_checks_rows_of_training_and_evaluation():
    broken = Prompt("1", [], "math", {"reward_spec": {"ground_truth": "(1,2"}}, where="eval.jsonl, line 7")
    with pytest.raises(DataError, match=r"eval\.jsonl, line 7: ground truth '\(1,2' cannot be read"):
        check_environments(load_preset(), rows("gsm8k"), PromptDataset((broken,), 0))


def test_environment_of_a_user_refuses_rows(monkeypatch: pytest.MonkeyPatch):
    class Own(TextEnv):
        @classmethod
        def parse_row(cls, extras: Mapping[str, Any]) -> Any:
            return extras["needed"]

    monkeypatch.setattr("skyrl_train.environments.registry.find", lambda name: Own)
    check_rows("own", [("a.jsonl, line 1", {"needed": 1})])
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: KeyError: 'needed'"):
        check_rows("own", [("a.jsonl, line 1", {})])
