from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.config.hydra import flag_parser, load_preset, print_hydra_info
from skyrl_train.config.keys import KEY_SUGGESTIONS, suggest_key, value_keys
from skyrl_train.config.prepare import read_command_line
from skyrl_train.errors import ConfigError


def command_line_problems(*argv: str) -> str:
    return "\n".join(str(problem) for problem in read_command_line(argv).problems)


@pytest.mark.fault("F01")
@pytest.mark.parametrize("prefix", ["", "+", "++", "~"])
def test_unknown_key_gets_suggestion_with_any_prefix(prefix: str):
    assert (
        command_line_problems(f"{prefix}trainer.epcohs=20")
        == "trainer.epcohs=20: unknown key. Did you mean trainer.epochs?"
    )


@pytest.mark.fault("F01")
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.train_batchsize", "trainer.train_batch_size"),
        ("epochs", "trainer.epochs"),
        ("lr", "trainer.policy.optimizer_config.lr"),
        ("traner.epochs", "trainer.epochs"),
        ("generator.train_batch_size", "trainer.train_batch_size"),
        ("generator.temperature", "generator.sampling_params.temperature"),
        ("trainer.policy.optimizer_config.adam_beta", "trainer.policy.optimizer_config.adam_betas"),
        ("trainer.lr", "trainer.policy.optimizer_config.lr"),
        ("trainer.policy.lr", "trainer.policy.optimizer_config.lr"),
        ("trainer.model.path", "trainer.policy.model.path"),
        ("trainer.learning_rate", "trainer.policy.optimizer_config.lr"),
        ("trainer.batch_size", "trainer.train_batch_size"),
        ("max_new_tokens", "generator.sampling_params.max_generate_length"),
    ],
)
def test_nearest_key_is_the_one_that_was_meant(wrong: str, right: str):
    assert suggest_key(wrong) == right


def test_suggestions_map_foreign_names_to_keys():
    assert [key for key in KEY_SUGGESTIONS.values() if key not in value_keys()] == []
    own = {"max_tokens", "model", "model_name", "temperature"}  # ours as well, in one section
    assert [name for name in KEY_SUGGESTIONS if name in {key.rpartition(".")[2] for key in value_keys()} - own] == []


@pytest.mark.fault("F01")
def test_key_without_any_likeness_points_to_the_documentation():
    assert (
        command_line_problems("+qwertz=1")
        == "qwertz=1: unknown key. docs/reference/configuration/index.md lists all keys."
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("environment.skyrl_gym.guess.limit", "environment.skyrl_gym.own.guess.limit"),
        ("environment.skyrl_gym.gsm8.method", "environment.skyrl_gym.gsm8k.method"),
        ("environment.skyrl_gym.max_env_worker", "environment.skyrl_gym.max_env_workers"),
    ],
)
def test_setting_of_own_environment_is_told_from_misspelled_built_in_one(wrong: str, right: str):
    assert f"{wrong}=1: unknown key. Did you mean {right}?" in command_line_problems(f"{wrong}=1")


@pytest.mark.fault("F01")
def test_key_below_a_value_is_unknown():
    assert "trainer.epochs.x=1: unknown key." in command_line_problems("trainer.epochs.x=1")


@pytest.mark.parametrize(
    "text",
    [
        "+generator.engine_init_kwargs.foo=1",
        "++generator.engine_init_kwargs.foo.bar=[1,2]",
        "generator.chat_template_kwargs.enable_thinking=false",
        "trainer.policy.model_config_kwargs={num_hidden_layers: 2}",
        "generator.rope_scaling={rope_type: yarn, factor: 2.0}",
        "trainer.policy.megatron_config.optimizer_config_kwargs.anything=nan",
        "~trainer.policy.megatron_config.optimizer_config_kwargs.optimizer_cpu_offload",
        "data.train_data=['a.parquet']",
        "data.train_data=[a.parquet,'b c.parquet']",
        "data.train_data=a.parquet",
        "trainer.epochs=20",
        "+trainer.epochs=20",
        "trainer.policy.optimizer_config.lr=1e-6",
        "trainer.policy.optimizer_config.lr=0",
        "trainer.logger=wandb",
        "trainer.logger=[console,wandb]",
        "trainer.run_name=20",
        "trainer.run_name='a=b, c'",
        "trainer.max_steps=null",
        "trainer.policy.fsdp_config.reshard_after_forward=8",
        "trainer.ckpt_path=${oc.env:HOME}/x",
        "trainer.eval_batch_size=${trainer.train_batch_size}",
        "trainer.policy.optimizer_config={lr: 1e-5}",
        "generator.sampling_params.max_new_tokens=64",
        "generator.sampling_params.stop='</answer>'",
    ],
)
def test_what_recipes_write_is_accepted(text: str):
    assert read_command_line([text]).problems == []


@pytest.mark.fault("F02")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer.epochs=many", "trainer.epochs=many: must be an integer."),
        ("trainer.epochs=2.0", "trainer.epochs=2.0: must be an integer. Write 2."),
        ("trainer.epochs='20'", "trainer.epochs=20: must be an integer. Write the number without quotes."),
        ("trainer.epochs=true", "trainer.epochs=true: must be an integer."),
        ("trainer.epochs=null", "trainer.epochs=null: must be an integer."),
        ("trainer.bf16=1", "trainer.bf16=1: must be true or false. Write true."),
        ("trainer.bf16=yes", "trainer.bf16=yes: must be true or false."),
        ("trainer.max_steps=x", "trainer.max_steps=x: must be an integer or null."),
        ("trainer.policy.optimizer_config.lr=nan", "trainer.policy.optimizer_config.lr=nan: must be a finite number."),
        (
            "trainer.policy.optimizer_config.lr=-inf",
            "trainer.policy.optimizer_config.lr=-inf: must be a finite number.",
        ),
        ("trainer.run_name=true", "trainer.run_name=true: must be text."),
        ("trainer.run_name=[a]", "trainer.run_name=['a']: must be text."),
        ("trainer.plugins=[1.5,[]]", "trainer.plugins=[1.5, []]: must be a list (text each)."),
        ("generator.engine_init_kwargs=3", "generator.engine_init_kwargs=3: must be a mapping."),
        (
            "generator.eval_n_samples_by_data_source={aime: x}",
            "generator.eval_n_samples_by_data_source={'aime': 'x'}: must be a mapping (an integer each).",
        ),
        (
            "environment.host_resources={a: x}",
            "environment.host_resources={'a': 'x'}: must be a mapping (a finite number each).",
        ),
        ("trainer.policy=3", "trainer.policy=3: must be a section. Set the keys below it: trainer.policy.KEY=VALUE."),
        ("trainer.policy.optimizer_config={lr: x}", "trainer.policy.optimizer_config.lr=x: must be a finite number."),
        ("trainer.epochs=1,2", "trainer.epochs=1,2: must be one value."),
        ("~trainer.epochs", "trainer.epochs=null: must be set, not deleted. Write trainer.epochs=VALUE."),
        ("trainer.epochs", "trainer.epochs: is not of the form key=value."),
        ("trainer.run_name=a=b", "trainer.run_name=a=b: cannot be parsed."),
    ],
)
def test_invalid_value_error_names_allowed_values(text: str, message: str):
    assert command_line_problems(text).startswith(message)


@pytest.mark.fault("F02")
def test_quoted_list_is_not_a_file_name():
    assert "Put the quotes around the whole argument" in command_line_problems("data.train_data=\"['a.parquet']\"")


def test_all_problems_come_at_once_and_in_order():
    problems = read_command_line(["trainer.epcohs=1", "trainer.seed=x", "trainer.epochs=2", "+nothing=3"]).problems
    assert [problem.key for problem in problems] == ["trainer.epcohs", "trainer.seed", "nothing"]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("generator.sampling_params.max_new_tokens", "generator.sampling_params.max_generate_length"),
        ("generator.tensor_parallel_size", "generator.inference_engine_tensor_parallel_size"),
    ],
)
def test_contradicting_alias_is_an_error(alias: str, name: str):
    def value(config: object) -> object:
        for part in name.split("."):
            config = getattr(config, part)
        return config

    assert value(load_preset([f"{alias}=64"])) == 64
    assert value(load_preset([f"+{alias}=64"])) == 64
    assert read_command_line([f"{alias}=64", f"{name}=64"]).problems == []
    for pair in ((alias, name), (name, alias)):
        assert "These are two names of one setting" in command_line_problems(f"{pair[0]}=64", f"{pair[1]}=32")


@pytest.mark.parametrize("flag", ["--multirun", "--config-path=x", "--experimental-rerun=x.pickle"])
def test_unsupported_flags_name_an_alternative(flag: str):
    assert command_line_problems(flag).startswith(f"{flag.partition('=')[0]}: is not supported. ")


@pytest.mark.fault("F01")
def test_load_refuses_what_the_command_line_check_refuses():
    with pytest.raises(ConfigError) as caught:
        load_preset(["+trainer.epcohs=1", "trainer.seed=x"])
    head, *lines = str(caught.value).splitlines()
    assert head == "2 problems in the configuration:"
    assert {line.strip() for line in lines} == set(
        command_line_problems("+trainer.epcohs=1", "trainer.seed=x").splitlines()
    )


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_text_makes_the_check_raise(text: str):
    if not text.startswith("-"):
        for problem in read_command_line([text, f"trainer.run_name={text}", f"+{text}=1"]).problems:
            assert "\n" not in str(problem)


def test_all_flags_of_hydra_are_parsed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["skyrl-train"])
    with pytest.raises(SystemExit):
        print_hydra_info(["--hydra-help"], [])
    lines = re.findall(r"^ *(--\S+) : ", capsys.readouterr().out, re.MULTILINE)
    shown = {flag for line in lines for flag in line.split(",")}
    assert "--config-name" in shown and "-cn" in shown
    assert shown == {flag for action in flag_parser()._actions for flag in action.option_strings}
