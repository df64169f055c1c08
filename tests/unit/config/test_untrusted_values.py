from __future__ import annotations

import importlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf.basecontainer import BaseContainer

from skyrl_train.config.hydra import load_preset, save_resolved, to_dict
from skyrl_train.config.prepare import PreparedConfig, prepare_config, run_entrypoint
from skyrl_train.config.redaction import redact
from skyrl_train.config.value_parsing import (
    ALLOWED_RESOLVERS,
    find_unsafe_values,
    find_value_problems,
    is_public_variable,
)
from skyrl_train.errors import ConfigError

SECRET = "s3cr3t-value-of-a-credential"

RESOLVERS_OF_OMEGACONF = {
    "oc.create",
    "oc.decode",
    "oc.deprecated",
    "oc.dict.keys",
    "oc.dict.values",
    "oc.env",
    "oc.select",
}
RESOLVERS_OF_HYDRA = {"hydra", "now", "python_version"}


def is_refused(value: object) -> bool:
    return bool(list(find_unsafe_values("trainer.run_name", value)))


@pytest.mark.fault("F03")
def test_set_of_resolvers_is_pinned():
    assert {"oc.env"} == ALLOWED_RESOLVERS
    known = "from omegaconf.basecontainer import BaseContainer; import skyrl_train.config.prepare as _; "
    script = known + "print(*sorted(BaseContainer._resolvers))"
    fresh = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert set(fresh.stdout.split()) <= RESOLVERS_OF_OMEGACONF | RESOLVERS_OF_HYDRA, "a new resolver: is it safe?"


@pytest.mark.fault("F03")
@pytest.mark.parametrize("name", sorted({*RESOLVERS_OF_OMEGACONF, *RESOLVERS_OF_HYDRA, "eval", "x.y"} - {"oc.env"}))
def test_every_resolver_but_environment_variables_is_refused(name: str):
    for text in (
        f"${{{name}:a}}",
        f"a${{ {name} : b }}c",
        f"${{oc.env:HOME,${{{name}:x}}}}",
        f"${{trainer.${{{name}:y}}}}",
    ):
        assert is_refused(text), text
        assert find_value_problems("", {"trainer": {"run_name": text}}), text
        assert find_value_problems("", {"generator": {"engine_init_kwargs": {"deep": [{"down": text}]}}}), text


@pytest.mark.fault("F03")
@pytest.mark.parametrize(
    "text", ["${${x}:a}", "${oc.env:${x}}", "\\${now:a}", "${", "$${now:a}", "${oc.env:HOME}${now:a}"]
)
def test_text_that_is_built_to_pass_is_refused(text: str):
    assert is_refused(text)


@pytest.mark.parametrize(
    "text", ["plain", "$HOME", "${trainer.seed}", "a/${..seed}/b", "${oc.env:HOME}/x", "${oc.env:HF_HOME, /tmp}", "{x}"]
)
def test_references_to_keys_and_folders_are_accepted(text: str):
    assert not is_refused(text)


@pytest.mark.fault("F03")
@pytest.mark.parametrize(
    "override",
    [
        "+generator.engine_init_kwargs._target_=os.system",
        "generator.engine_init_kwargs={a: [{_target_: os.system}]}",
        "trainer.run_name=_target_",
        "trainer.policy._target_=os.system",
        "+hydra.callbacks.x._target_=os.system",
        "trainer.run_name=${now:%Y}",
        "trainer.seed=${python_version:}",
    ],
)
def test_command_line_cannot_run_code(override: str):
    with pytest.raises(ConfigError, match="1 problem "):
        prepare_config([override], has_accelerator=False)


@pytest.mark.fault("F03")
def test_yaml_cannot_run_code(tmp_path: Path):
    witness = tmp_path / "witness"
    (tmp_path / "evil.yaml").write_text(
        "defaults: [ppo_base_config, _self_]\n"
        f"generator: {{engine_init_kwargs: {{a: {{_target_: pathlib.Path.touch, self: {witness}}}}}}}\n"
        "trainer: {run_name: '${oc.decode:x}'}\n"
        f"hydra: {{callbacks: {{x: {{_target_: pathlib.Path.touch, self: {witness}}}}}}}\n"
    )
    arguments = ["--config-dir", str(tmp_path), "--config-name", "evil"]
    with pytest.raises(ConfigError) as caught:
        prepare_config(arguments, has_accelerator=False)
    for part in (
        "generator.engine_init_kwargs.a._target_",
        "trainer.run_name=${oc.decode:x}",
        "hydra.callbacks.x._target_",
    ):
        assert part in str(caught.value)
    with pytest.raises(SystemExit):
        run_entrypoint(lambda prepared: None, [*arguments, "--cfg", "job", "--resolve"])
    assert not witness.exists()


@pytest.mark.fault("F04")
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("HOME", True),
        ("DATA_DIR", True),
        ("HF_HOME", True),
        ("SLURM_JOB_ID", True),
        ("OPENAI_API_KEY", False),
        ("WANDB_API_KEY", False),
        ("HF_TOKEN", False),
        ("HF_TOKEN_PATH", False),
        ("AWS_SECRET_ACCESS_KEY", False),
        ("DB_PASSWORD_DIR", False),
        ("DATABASE_URL", False),
    ],
)
def test_only_public_variables_may_be_referenced(name: str, shown: bool):
    assert is_public_variable(name) is shown
    assert is_refused(f"x-${{oc.env:{name}}}") is not shown


@pytest.mark.fault("F04")
@pytest.mark.parametrize("flags", [[], ["--cfg", "job"], ["--cfg", "job", "--resolve"]])
@pytest.mark.parametrize("where", ["command line", "yaml"])
def test_secret_of_the_environment_is_never_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    where: str,
):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    text = "${oc.env:MY_API_KEY}"
    (tmp_path / "leak.yaml").write_text(f"defaults: [ppo_base_config, _self_]\ntrainer: {{run_name: '{text}'}}\n")
    leak = ["--config-dir", str(tmp_path), "--config-name", "leak"] if where == "yaml" else [f"trainer.run_name={text}"]
    with pytest.raises(SystemExit) as stop:
        run_entrypoint(lambda prepared: print(prepared.config), [*leak, *flags])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert text in printed.err
    assert SECRET not in printed.err + printed.out


@pytest.mark.fault("F04")
def test_interpolation_of_rejected_key_stays_unresolved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    with pytest.raises(ConfigError) as caught:
        load_preset(["trainer.run_name=${oc.env:MY_API_KEY}", "trainer.seed=${trainer.run_name}"])
    assert SECRET not in str(caught.value)


@pytest.mark.fault("F04")
def test_saved_configuration_has_no_secret_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "none")
    config = load_preset([f"+generator.engine_init_kwargs.headers.key='Bearer {SECRET}'", "trainer.run_name=none"])
    save_resolved(config, tmp_path / "run" / "config.yaml")
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert SECRET not in text
    assert "Bearer <MY_API_KEY>" in text
    assert "run_name: none" in text
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.mark.fault("F04")
@pytest.mark.defect("errors-repeat-typed-secrets")
@pytest.mark.parametrize(
    "typed",
    [
        [f"+generator.api_key={SECRET}"],
        [f"trainer.seed={SECRET}"],
        [f"+generator.list=[{SECRET}]", "trainer.seed=x"],
        [f"{SECRET}=1"],
        [f"trainer.run_name={SECRET}", "--cfg", "job"],
        [f"trainer.run_name={SECRET}"],
    ],
)
def test_a_secret_that_was_typed_is_not_repeated(
    typed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\n")

    def task(prepared: PreparedConfig) -> None:
        raise ConfigError(f"trainer.run_name={prepared.config.trainer.run_name!r} cannot be used.")

    with suppress(SystemExit):  # Hydra's flags print and end well
        run_entrypoint(task, typed)
    printed = "".join(capsys.readouterr())
    assert SECRET not in printed and "<OPENAI_API_KEY>" in printed


@pytest.mark.fault("F04")
def test_redact_goes_into_everything_plain():
    environ = {"A_TOKEN": SECRET, "B_DIR": "/data/folder"}
    value = {"a": [f"x{SECRET}y", {"b": (SECRET,)}], SECRET: 1, "c": "/data/folder", "d": None}
    shown = redact(value, environ)
    assert shown == {"a": ["x<A_TOKEN>y", {"b": ["<A_TOKEN>"]}], "<A_TOKEN>": 1, "c": "/data/folder", "d": None}


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"A_TOKEN": "aaaaaaaa", "B_TOKEN": "aaaaaaaabbbb"}, "<A_TOKEN> <B_TOKEN> disabled"),
        ({"DB_PASS": "aaaaaaaabbbb"}, "aaaaaaaa <DB_PASS> disabled"),
        ({"RAY_AUTH_MODE": "disabled"}, "aaaaaaaa aaaaaaaabbbb disabled"),
    ],
)
def test_whole_secrets_are_replaced_and_words_are_not(environ: dict[str, str], shown: str):
    assert redact("aaaaaaaa aaaaaaaabbbb disabled", environ) == shown


def test_composing_leaves_no_resolver_of_hydra_behind():
    before = set(BaseContainer._resolvers)
    to_dict(load_preset(["trainer.seed=1"]))
    assert set(BaseContainer._resolvers) == before


SERVER = "{command: evil-program, args: [-c], tools: [a]}"


@pytest.fixture
def copied_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a run's folder whose configuration names a module next to it and a program."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        "defaults: [ppo_base_config, _self_]\n"
        "trainer: {plugins: [module_of_a_copied_run]}\n"
        f"environment: {{skyrl_gym: {{tool_use: {{tool_settings: {{mcp: {{servers: {{a: {SERVER}}}}}}}}}}}}}\n"
    )
    (run / "run.json").write_text("{}")
    (run / "module_of_a_copied_run.py").write_text(f"open({str(tmp_path / 'witness')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(run))
    return run


@pytest.mark.fault("F38")
@pytest.mark.parametrize("command", ["env_try", "check_config"])
def test_copied_run_cannot_run_code(copied_run: Path, capsys: pytest.CaptureFixture[str], command: str):
    given = ["--config-dir", str(copied_run), "--config-name", "config"]
    own = ["gsm8k", "--data", "rows.jsonl"] if command == "env_try" else ["--elsewhere", "--plan"]
    main = importlib.import_module(f"skyrl_train.entrypoints.{command}").main
    with pytest.raises(SystemExit) as left:
        main([*own, *given])
    output = capsys.readouterr().err
    assert left.value.code == 2 and not (copied_run.parent / "witness").exists()
    assert "trainer.plugins=['module_of_a_copied_run']: must be repeated on the command line" in output
    assert "mcp.servers.a.command=evil-program: must be repeated" in output and "mcp.servers.a.args=" in output


@pytest.mark.parametrize("flags", [[], ["--cfg", "job"]])
def test_copied_run_hydra_section_imports_nothing(
    copied_run: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
):
    (copied_run / "config.yaml").write_text(
        "defaults: [ppo_base_config, _self_]\nhydra: {searchpath: ['pkg://module_of_a_copied_run']}\n"
    )
    main = importlib.import_module("skyrl_train.entrypoints.check_config").main
    with pytest.raises(SystemExit) as left:
        main(["--elsewhere", *flags, "--config-dir", str(copied_run), "--config-name", "config"])
    assert left.value.code == 2 and not (copied_run.parent / "witness").exists()
    assert "hydra={'searchpath': ['pkg://module_of_a_copied_run']}: must be left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("environment: {skyrl_gym: {verifiers: {env_id: evil}}}", "environment.skyrl_gym.verifiers.env_id"),
        (
            "environment: {skyrl_gym: {llm_as_a_judge: {base_url: 'http://evil'}}}",
            "environment.skyrl_gym.llm_as_a_judge.base_url",
        ),
        ("environment: {skyrl_gym: {agent: {command: [evil]}}}", "environment.skyrl_gym.agent.command"),
        ("environment: {skyrl_gym: {agent: {run: 'evil:run'}}}", "environment.skyrl_gym.agent.run"),
        ("environment: {skyrl_gym: {agent: {python: /evil}}}", "environment.skyrl_gym.agent.python"),
        ("environment: {skyrl_gym: {agent: {grader: [evil]}}}", "environment.skyrl_gym.agent.grader"),
        ("environment: {skyrl_gym: {agent: {env: {A: evil}}}}", "environment.skyrl_gym.agent.env"),
        (
            "environment: {skyrl_gym: {agent: {sandbox: {kind: 'evil:Box'}}}}",
            "environment.skyrl_gym.agent.sandbox.kind",
        ),
        (
            "environment: {skyrl_gym: {agent: {sandbox: {kind: docker, image: evil}}}}",
            "environment.skyrl_gym.agent.sandbox.image",
        ),
        ("environment: {skyrl_gym: {openenv: {token_variable: A}}}", "environment.skyrl_gym.openenv.token_variable"),
        (
            "environment: {skyrl_gym: {tool_use: {tool_settings: {mcp: null, browser: {executable: evil}}}}}",
            "environment.skyrl_gym.tool_use.tool_settings.browser.executable",
        ),
        (
            "generator: {run_engines_locally: false, remote_inference_engine_urls: ['http://evil:1']}",
            "generator.remote_inference_engine_urls",
        ),
        (
            "generator: {engine_init_kwargs: {worker_extension_cls: evil, max_num_seqs: 8}}",
            "generator.engine_init_kwargs.worker_extension_cls",
        ),
        (
            "generator: {engine_init_kwargs: {trust_remote_code: true}}",
            "generator.engine_init_kwargs.trust_remote_code",
        ),
    ],
)
def test_copied_run_requires_repeating_sensitive_keys(copied_run: Path, section: str, key: str):
    (copied_run / "config.yaml").write_text(f"# @package _global_\ndefaults: [/ppo_base_config, _self_]\n{section}\n")
    for given in (
        ["--config-dir", str(copied_run), "--config-name", "config"],
        ["--config-dir", str(copied_run.parent), "--config-name", "run/config"],
    ):
        with pytest.raises(ConfigError, match="1 problem") as error:
            prepare_config(given, False, trust_run_folder=False)
        assert f"{key}=" in str(error.value) and "must be repeated on the command line" in str(error.value)
        prepare_config(given, False)


def test_command_line_and_presets_are_trusted(copied_run: Path):
    given = ["--config-dir", str(copied_run), "--config-name", "config"]
    told = [
        "trainer.plugins=[module_of_a_copied_run]",
        "environment.skyrl_gym.tool_use.tool_settings.mcp.servers.a.command=evil-program",
        "environment.skyrl_gym.tool_use.tool_settings.mcp.servers.a.args=[-c]",
    ]
    assert prepare_config([*given, *told], False, trust_run_folder=False).config.trainer.plugins == (
        "module_of_a_copied_run",
    )
    with pytest.raises(ConfigError, match=r"trainer\.plugins="):
        prepare_config([*given, *told[1:]], False, trust_run_folder=False)
    (copied_run / "run.json").unlink()
    assert prepare_config(given, False, trust_run_folder=False).config.trainer.plugins, (
        "a folder of presets is the user's own"
    )
