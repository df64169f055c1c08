from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.entrypoints.from_skyrl import Translation, main, translate
from skyrl_train.errors import ConfigError
from skyrl_train.skyrl.shell_parser import display_word

REPOSITORY = Path(__file__).parents[3]
TODAYS = r"""
set -x
# bash examples/train/megatron/run.sh
DATA_DIR="$HOME/data/gsm8k"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}" # or wandb
MODEL="Qwen/Qwen3-0.6B"
MINI=$((16 * 4))
TEMPLATE="$(dirname "$0")/chat.jinja"

uv run --isolated --extra megatron -m skyrl.train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.policy.model.path=$MODEL \
  trainer.strategy=megatron \
  trainer.policy.megatron_config.tensor_model_parallel_size=2 \
  trainer.policy.megatron_config.moe_grouped_gemm=true \
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \
  trainer.remove_microbatch_padding=true \
  trainer.max_training_steps=20 \
  trainer.policy_mini_batch_size=$MINI \
  trainer.algorithm.loss_reduction=token_mean_legacy \
  trainer.policy.language_model_only=True \
  generator.inference_engine.language_model_only=True \
  generator.inference_engine.num_engines=$NUM_GPUS \
  generator.inference_engine.backend=vllm \
  generator.inference_engine.engine_init_kwargs='{"kernel_config": {"moe_backend": "triton"}}' \
  generator.chat_template.source=file generator.chat_template.name_or_path="$TEMPLATE" \
  generator.sampling_params.stop='["</sql>", "</solution>"]' \
  generator.eval_sampling_params.stop='["</sql>", "</solution>"]' \
  trainer.logger="$LOGGER" \
  trainer.run_name="run-$(date +%s)" \
  "$@"
"""


def words(translation: Translation) -> list[str]:
    """Return the words that a shell passes to the command."""
    stub = 'uv() { printf "%s\\n" "$@"; }\n'
    environment = {"PATH": os.environ["PATH"], "HOME": "/home/me"}
    return subprocess.check_output(["bash", "-c", f"{stub}{translation}"], text=True, env=environment).splitlines()


def test_todays_recipe_becomes_a_command_of_this_package():
    translation = translate(TODAYS, "recipes/run.sh", ["trainer.seed=1", "trainer.max_training_steps=5"])
    assert translation.problems == []
    _, *head, module = words(translation)[:5]
    assert (head, module) == (["--extra", "vllm", "-m"], "skyrl_train.entrypoints.main_base")
    config = prepare_config(words(translation)[5:], has_accelerator=True).config
    assert config.data.train_data == ("/home/me/data/gsm8k/train.parquet",)
    assert (config.trainer.max_steps, config.trainer.seed, config.trainer.policy_mini_batch_size) == (5, 1, 64)
    assert config.trainer.policy.language_model_only is True
    assert config.trainer.policy.tensor_parallel_size == 2
    assert config.trainer.algorithm.loss_reduction == "token_mean_legacy"
    assert config.generator.engine_init_kwargs == {"kernel_config": {"moe_backend": "triton"}}
    assert config.generator.chat_template.name_or_path == "recipes/chat.jinja"
    assert config.generator.sampling_params.stop == ("</sql>", "</solution>")
    assert config.trainer.run_name.removeprefix("run-").isdecimal()
    assert str(translation).count("language_model_only") == 1 and "inference_engine." not in str(translation)


def test_differences_are_explained():
    translation = translate(TODAYS)
    notes = "\n".join(translation.notes)
    assert "skyrl.train.entrypoints.main_base -> skyrl_train.entrypoints.main_base" in notes
    assert "trainer.policy.megatron_config.moe_grouped_gemm=true: no effect. Only Megatron reads it." in notes
    assert "moe_grouped_gemm" not in str(translation)
    assert "$(date +%s) is left to your shell." in notes and "$HOME is left" not in notes
    assert "generator.eval_sampling_params.temperature=1.0 is added" in notes
    assert "generator.eval_sampling_params.temperature=1.0" in words(translation)
    assert "generator.eval_sampling_params.max_generate_length=1024" in words(translation)


def test_recipe_of_0_3_is_kept():
    text = (
        "uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base trainer.use_sample_packing=true \\\n"
        '  +generator.engine_init_kwargs.max_model_len=99 generator.eval_sampling_params.top_p=0.7 "$@"'
    )
    translation = translate(text)
    assert (translation.module, translation.problems, translation.notes) == (
        "skyrl_train.entrypoints.main_base",
        [],
        [],
    )
    assert words(translation)[5:] == [
        "trainer.use_sample_packing=true",
        "+generator.engine_init_kwargs.max_model_len=99",
        "generator.eval_sampling_params.top_p=0.7",
    ]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("examples.train.algorithms.dapo.main_dapo", "examples.algorithms.dapo.main_dapo"),
        ("examples.train.algorithms.dapo.main_dapo_fully_async", "examples.fully_async.main_fully_async"),
        ("examples.train_scripts.full_context.main_full_ctx", "scripts.full_context.main_full_ctx"),
        (
            "examples.train_integrations.openenv.entrypoints.main_openenv",
            "integrations.openenv.entrypoints.main_openenv",
        ),
        ("skyrl.train.entrypoints.serve", "skyrl_train.entrypoints.serve"),
        ("my_project.train", "my_project.train"),
    ],
)
def test_modules_are_those_that_are_here(theirs: str, ours: str):
    translation = translate(f"python -m {theirs} trainer.seed=1")
    assert (translation.module, translation.problems) == (ours, [])


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("examples.harbor.entrypoints.main_harbor", "a service of its own. environment.env_class=agent"),
        ("examples.train_integrations.harbor.entrypoints.main_harbor_generate", "a service of its own."),
        ("examples.terminal_bench.entrypoints.main_tbench", "containers of its own. environment.env_class=agent"),
        ("examples.flash_rl.main_dapo_flashrl", "a patched vLLM. examples.tis_correction.main_tis_dapo"),
    ],
)
def test_missing_module_is_refused_with_alternative(module: str, advice: str):
    (problem,) = translate(f"python -m {module} trainer.seed=1").problems
    assert problem.startswith(f"{module} has no equivalent here. ") and advice in problem


def test_settings_without_equivalent_are_refused():
    text = (
        "python examples/train/visgym/entrypoint.py --env_variant instruct generator.vision_language_generator=true "
        "trainer.algorithm.temperature=0.5 trainer.policy.megatron_config.moe_aux_loss_coeff=0.01 trainer.sed=1"
    )
    assert translate(text).problems == [
        "examples.train.visgym.entrypoint has no equivalent here. "
        "docs/guides/from_skyrl.md says how to run SkyRL's programs.",
        "--env_variant is not key=value.",
        "instruct is not key=value.",
        "trainer.sed=1: unknown key. Did you mean trainer.seed?",
        "trainer.policy.megatron_config.moe_aux_loss_coeff=0.01: must be 0. trainer.algorithm.router_aux_loss_coef is "
        "the coefficient of the loss that balances experts.",
        "trainer.algorithm.temperature=0.5: must be null or 1.0. Log-probs always use the temperature of "
        "sampling. Set generator.sampling_params.temperature.",
        "generator.vision_language_generator=true: must be false. Only text models are supported.",
    ]


def test_keys_of_a_program_get_their_plus():
    translation = translate("python -m examples.train.mini_swe_agent.main_mini_swe generator.miniswe_traj_dir=/x")
    assert translation.problems == [] and words(translation)[-1] == "+generator.miniswe_traj_dir=/x"


def test_values_only_a_shell_knows_are_unchecked():
    text = (
        "python -m skyrl.train.entrypoints.main_base trainer.seed=$SEED trainer.epochs=$(nproc) trainer.max_steps=$MINE"
    )
    translation = translate(text, environment={"MINE": "no number"})
    assert translation.problems == ["trainer.max_steps=no number: must be an integer or null."]
    assert translation.notes[1:] == ["$SEED is left to your shell.", "$(nproc) is left to your shell."]
    assert str(translation).endswith(
        '"trainer.seed=$SEED" \\\n  "trainer.epochs=$(nproc)" \\\n  "trainer.max_steps=$MINE"'
    )


def test_keys_with_another_meaning_are_named():
    text = (
        "python -m {} generator.step_wise_trajectories=true generator.max_turns=3 "
        "generator.sampling_params.repetition_penalty=1.1 {}"
    )
    todays, older = "skyrl.train.entrypoints.main_base", "skyrl_train.entrypoints.main_base"
    penalty, steps = "does not pass it to the engine", "become one sequence, as with merge_stepwise_output=true"
    notes = "\n".join(translate(text.format(todays, "")).notes)
    assert penalty in notes and steps in notes
    assert steps not in "\n".join(translate(text.format(todays, "generator.merge_stepwise_output=true")).notes)
    assert translate(text.format(older, "")).notes == []


def test_values_with_expansions_are_checked_around_them():
    text = 'python -m skyrl.train.entrypoints.main_base trainer.run_name="a_${USER^^}" trainer.seed="${seed}"'
    assert translate(text).problems == []


def test_called_script_gets_arguments_and_variables(tmp_path: Path):
    folder = tmp_path / "examples" / "train"
    folder.mkdir(parents=True)
    start = "python -m skyrl.train.entrypoints.main_base"
    (folder / "run.sh").write_text(
        f': "${{SEED:=1}}" "${{STEPS:=2}}"\n{start} trainer.seed=$SEED trainer.max_steps=$STEPS '
        'trainer.run_name=$NAME "$@"'
    )
    wrapper = 'export STEPS=7 NAME="a$USER"\nSEED=5 bash examples/train/run.sh trainer.epochs=3 "$@"'
    translation = translate(wrapper, str(folder / "wrapper.sh"), ["trainer.bf16=false"])
    expected = ["trainer.seed=5", "trainer.max_steps=7", "trainer.run_name=a$USER", "trainer.epochs=3"]
    assert [display_word(word) for word in translation.overrides] == [*expected, "trainer.bf16=false"]
    assert translation.notes[0].endswith("wrapper.sh calls examples/train/run.sh.")


def test_dropped_arguments_and_environment_are_named():
    translation = translate(
        "MINE=1 python -m skyrl.train.entrypoints.main_base trainer.seed=1", arguments=["trainer.seed=2"]
    )
    assert translation.notes[:2] == [
        "the recipe does not pass on its arguments, so trainer.seed=2 is left out.",
        "the recipe exports MINE; export them, too, if the run needs them.",
    ]


def test_cispo_has_todays_bounds():
    translation = translate("python -m skyrl.train.entrypoints.main_base trainer.algorithm.policy_loss_type=cispo")
    assert "trainer.algorithm.cispo.cispo_eps_clip_low=1.0" in words(translation)
    assert "trainer.algorithm.cispo.cispo_eps_clip_high=4.0" in words(translation)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo a=1", "no command `... -m MODULE key=value ...` was found; loops and functions are not followed."),
        (
            "bash examples/train/gsm8k/run.sh trainer.seed=1",
            "calls examples/train/gsm8k/run.sh, which was not found. Give that script and its arguments instead.",
        ),
        (
            "python -m skyrl.train.main_sft batch_size=4",
            "Start skyrl_train.entrypoints.main_sft; docs/guides/from_skyrl.md",
        ),
        ("python examples/train/callbacks/main_sft_with_callbacks.py batch_size=4", "has keys of its own"),
        ("A='x", "line 1: a closing ' is missing"),
    ],
)
def test_other_scripts_are_refused(text: str, message: str):
    with pytest.raises(ConfigError) as refused:
        translate(text)
    assert message in str(refused.value)


def test_script_prints_command_and_notes(tmp_path: Path):
    (tmp_path / "run.sh").write_text(TODAYS)
    environment = {**os.environ, "PYTHON": sys.executable, "NUM_GPUS": "2"}
    script = str(REPOSITORY / "scripts" / "from_skyrl")
    completed = subprocess.run(
        [script, "run.sh", "trainer.seed=7"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("uv run --extra vllm -m skyrl_train.entrypoints.main_base \\\n")
    assert "generator.num_inference_engines=2 \\\n" in completed.stdout and "$HOME/data/gsm8k" in completed.stdout
    assert completed.stdout.endswith("trainer.seed=7\n") or "trainer.seed=7 \\\n" in completed.stdout
    assert "note: skyrl.train.entrypoints.main_base -> " in completed.stderr


def test_refusals_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = tmp_path / "run.sh"
    recipe.write_text("python -m skyrl.train.entrypoints.main_base trainer.fully_async.simulate_training=true")
    for arguments in ([str(recipe)], [str(tmp_path / "absent.sh")]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert "refused: trainer.fully_async.simulate_training=true: must be false." in printed.err
    assert "absent.sh" in printed.err and printed.out.startswith("uv run")
