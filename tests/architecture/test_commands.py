"""A check covers every command and snippet of the documentation: `COMMANDS` and `SNIPPETS` name it.

Cheap properties of a command are checked here: its keys make a valid configuration, and its files and options exist.
The test named in its row runs it. A command that no test can run has the reason in its row.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from skyrl_train.config.key_help import format_help
from skyrl_train.config.prepare import prepare_config
from skyrl_train.entrypoints import cli
from tests.support.doc_pages import REPOSITORY, Command, commands, commands_of, fenced_blocks
from tests.support.table_cases import check_each

OWN_FLAGS = {"--plan", "--probe", "--elsewhere", "--resolve"}
PLACEHOLDERS = {"key=value", "..."}
Check = Callable[[Command], None]
CONFIGURATIONS = "tests/unit/entrypoints/test_documented_commands.py"


def check_config_keys(command: Command) -> None:
    """Check that the arguments of an entrypoint compose and are valid, apart from files missing on this machine."""
    programs = re.compile(r"skyrl-train$|skyrl_train\.|examples\.|integrations\.")
    start = next(at for at, word in enumerate(command.words) if programs.match(word))
    words = [word for word in command.words[start + 1 :] if word not in OWN_FLAGS | PLACEHOLDERS]
    if command.words[start] == "skyrl-train":
        assert words.pop(0) in cli.main.commands
    if "--help" in words:
        assert format_help([word for word in words if word != "--help"], 120)
    else:
        prepare_config(words, is_elsewhere="--elsewhere" in command.words)


def check_job_submit(command: Command) -> None:
    """Check the command after `--` of `ray job submit`, in a folder like the page's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY / "examples" / "gsm8k")
        check_config_keys(Command(command.page, command.words[command.words.index("--") + 1 :]))


def check_preset(command: Command) -> None:
    """Check a script that starts a preset: the preset with the given arguments."""
    script, *words = command.words
    text = (REPOSITORY / script).read_text()
    found = re.search(r"--config-name (\w+)", text)
    name = found[1] if found else words.pop(0)
    own = ["trainer.policy.model.path=model"] if not found else []
    prepare_config(["--config-dir", str((REPOSITORY / script).parent), "--config-name", name, *own, *words], True)


def files_and_options(command: Command) -> None:
    """Check that the named files exist in the repository and that the script contains the options."""
    script, *words = command.words if command.words[0] != "python" else command.words[1:]
    if script == "-m":
        script = f"{words.pop(0).replace('.', '/')}.py"
        script = script if not script.startswith("pytest") else "scripts/test"
    source = "".join(path.read_text() for path in _sources(REPOSITORY / script))
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in source or f"{word})" in source, f"{script} does not define the option {word}"
        elif word.partition("/")[0] in ("tests", "scripts", "examples"):
            assert (REPOSITORY / word).exists(), word


def _sources(script: Path) -> Iterator[Path]:
    """Check a script, the program it runs, and another file where it may read its arguments."""
    yield script
    text = script.read_text()
    if script.suffix != ".py":
        assert script.stat().st_mode & 0o111, f"{script} is not executable"
        for path in re.findall(r"(?:python|PYTHON:-python\}\") ([\w/]+\.py)", text):
            yield REPOSITORY / path
        for module in re.findall(r"-m (tests\.\w+)", text):
            yield REPOSITORY / module.replace(".", "/") / "__main__.py"
    yield from (
        path
        for name in re.findall(r"^from (\w+) import", text, re.M)
        if (path := script.parent / f"{name}.py").is_file()
    )
    if "conversion" in text:
        yield REPOSITORY / "skyrl_train" / "data" / "conversion.py"


def native_flags(command: Command) -> None:
    """Check that tests start a server with these options."""
    source = (REPOSITORY / "tests" / "support" / "native_servers.py").read_text()
    assert [word for word in command.words if word.startswith("--") and word not in source] == []


def extra(command: Command) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert re.findall(r"\[(\w+)\]", str(command))[0] in project["optional-dependencies"]


def check_run_command(command: Command) -> None:
    """Check that a command on run folders exists with these options, and that tests start it."""
    name = command.words[1]
    assert name in cli.main.commands
    source = (REPOSITORY / "skyrl_train" / "entrypoints" / f"{name}.py").read_text()
    assert [word for word in command.words if word.startswith("--") and f'"{word}"' not in source] == []
    started = re.compile(rf"\bentrypoints(\.| import [\w, ]*\b){name}\b|\"skyrl-train\", \"{name}\"|\"{name}\", ")
    assert any(started.search(path.read_text()) for path in (REPOSITORY / "tests").rglob("test_*.py"))


def covered_by(test: str) -> Check:
    """Check that a test runs the command, read from its page or written in the test."""

    def check(command: Command) -> None:
        source = _test(test)
        begins = re.findall(r'find_commands\(\s*r?"(.*?)"\s*\)', source)
        page = command.page if command.page.endswith("README.md") else Path(command.page).name
        reads = page in source and re.search(r"\b(fenced_blocks|snippets|read_text)\(", source)
        if not reads and not any(re.match(start, str(command)) for start in begins):
            missing = [word for word in _distinguishing_words(command) if word not in source]
            assert missing == [], f"{test} neither reads {command.page} nor contains these words of the command"

    return check


def same_program_as(test: str, differs: str) -> Check:
    """Check that the named test runs the same program in the given way, instead of the command itself."""

    def check(command: Command) -> None:
        program = _distinguishing_words(command)[0]
        assert differs and program in _test(test), f"{test} does not name {program}"

    return check


def _test(test: str) -> str:
    """Return the source of a test file, which must contain the named test."""
    path, _, name = test.partition("::")
    source = (REPOSITORY / path).read_text()
    assert f"def {name}" in source, f"{path} does not define {name}"
    return source


def _distinguishing_words(command: Command) -> list[str]:
    """Return the program, then its options and keys without their values."""
    first, *rest = command.words
    if first in ("python", "skyrl-train"):
        first, *rest = rest[1:] if rest[0] == "-m" else rest
    names = [word.partition("=")[0] for word in rest if word.startswith("--") or "=" in word]
    return [Path(first).name, *(name for name in names if name not in PLACEHOLDERS and name != "key")]


def untested(reason: str) -> Check:
    """Accept a command that no test runs, for the given reason."""
    return lambda command: None


COMMANDS: dict[str, tuple[Check, ...]] = {
    r"(export|cd|mkdir|\.) ": (untested("of the shell"),),
    "git clone URL": (untested("needs the address of the repository"),),
    "cp -r runs/first/": (covered_by("tests/integration/quickstart/test_quickstart.py"),),
    "pip install 'skyrl-train": (extra,),
    r"scripts/test\b|scripts/lint\b|\.ci/run": (files_and_options,),  # what runs the tests
    "scripts/viewer": (files_and_options, same_program_as("tests/unit/report/test_viewer_page.py", "with its npm")),
    r"scripts/(bootstrap|cpu_engines|docs)\b": (
        files_and_options,
        untested("scripts/test begins with it, or builds as it"),
    ),
    "scripts/quickstart": (files_and_options, covered_by("tests/integration/quickstart/test_quickstart.py")),
    "scripts/chaos": (files_and_options, covered_by("tests/integration/runs/test_chaos.py")),
    "scripts/gpu_check": (files_and_options, covered_by("tests/integration/gpu_check/test_gpu_check.py")),
    "python -m pytest tests/gpu": (files_and_options, untested("needs a GPU")),
    "scripts/from_skyrl": (files_and_options, covered_by("tests/unit/entrypoints/test_from_skyrl.py")),
    "scripts/check_cuda_wheels": (files_and_options, untested("downloads 18 GB")),
    "python scripts/recordings/record.py ": (files_and_options, covered_by("tests/unit/report/test_recorded_runs.py")),
    "python scripts/recordings/record.py$": (files_and_options, untested("takes an hour; with a name it is run")),
    r"python my_(rewards|tools)\.py": (covered_by("tests/integration/environments/test_guide_pages.py"),),
    "python make_rows.py": (covered_by("tests/integration/quickstart/test_your_environment.py"),),
    r"python -m examples\.agents\.train": (
        files_and_options,
        covered_by("tests/integration/runs/test_agents_example.py"),
    ),
    "uv (venv|pip install --python) agents-venv": (
        same_program_as("tests/integration/runs/test_agents_example.py", "with a folder of its own"),
    ),
    "uv (venv|pip install) .*/mini-swe-agent": (
        same_program_as("tests/integration/agents/test_mini_swe_agent.py", "with a folder of its own"),
    ),
    "skyrl-train train .*--config-name mini_swe_agent": (
        check_config_keys,
        same_program_as("tests/integration/agents/test_mini_swe_agent.py", "only the preset's agent and grader"),
    ),
    "uv (venv|pip install) .*verifiers-venv": (
        same_program_as("tests/integration/agents/test_verifiers_tasks.py", "with a folder of its own"),
    ),
    r"\S+/verifiers-venv/bin/python' examples/verifiers/run_task\.py": (
        untested("tests/integration/agents/test_verifiers_tasks.py runs the program in an environment of its own"),
    ),
    "python examples/quickstart/tool.py": (files_and_options, covered_by("tests/integration/quickstart/test_tool.py")),
    "python examples/quickstart/quickstart.py": (
        files_and_options,
        same_program_as("tests/integration/quickstart/test_recipes.py", "with few steps"),
    ),
    r"skyrl-train (train --config-dir|export) runs/quickstart": (
        covered_by("tests/integration/quickstart/test_recipes.py"),
    ),
    "python examples/torchrl/": (
        files_and_options,
        same_program_as("tests/integration/tensordict/test_torchrl_scripts.py", "with fewer steps"),
    ),
    "python examples/tensordict_grpo/": (
        files_and_options,
        same_program_as("tests/integration/tensordict/test_grpo_example.py", "its train(), as its main calls it"),
    ),
    r"python (-m )?examples[/.]\w+[/.]\w+_dataset": (
        files_and_options,
        covered_by("tests/integration/environments/test_dataset_scripts.py"),
    ),
    r"examples/\w+/run\w*\.sh": (check_preset, covered_by("tests/unit/config/test_examples.py")),
    "python -m skyrl_train.environments.tools.bm25": (covered_by("tests/unit/environments/tools/test_search_tool.py"),),
    r"python -m skyrl_train\.entrypoints\.serve": (
        check_config_keys,
        covered_by("tests/integration/runs/test_documented_runs.py"),
    ),
    r"python -m skyrl_train\.entrypoints\.check_config|skyrl-train (check|plan(?! --probe))": (
        check_config_keys,
        covered_by(CONFIGURATIONS),
    ),
    r"python -m skyrl_train\.entrypoints\.main_base .*--cfg|skyrl-train train --help": (
        check_config_keys,
        covered_by(CONFIGURATIONS),
    ),
    "skyrl-train plan --probe": (check_config_keys, covered_by("tests/integration/runs/test_probe.py")),
    r"python -m integrations\.verifiers": (untested("needs the verifiers library, which pins other versions"),),
    r"skyrl-train train '?trainer\.logger=": (
        check_config_keys,
        same_program_as(
            "tests/integration/runs/test_tracker_libraries.py", "main_base, in an environment with the library"
        ),
    ),
    r"skyrl-train train '?trainer\.plugins=\[(my_rewards|my_tools)\]": (
        check_config_keys,
        covered_by("tests/integration/environments/test_guide_pages.py"),
    ),
    r"skyrl-train train '?trainer\.plugins=": (
        check_config_keys,
        covered_by("tests/integration/quickstart/test_your_environment.py"),
    ),
    r"python -m skyrl_train\.entrypoints\.main_base '?data\.train_data=\S*s3:": (
        check_config_keys,
        covered_by("tests/integration/runs/test_storage.py"),
    ),
    "skyrl-train generate": (check_config_keys, covered_by("tests/integration/environments/test_guide_pages.py")),
    r"python -m skyrl_train\.entrypoints\.|skyrl-train train ": (
        check_config_keys,
        covered_by("tests/integration/runs/test_documented_runs.py"),
    ),
    r"python -m (examples\.\w*async|integrations\.openenv)\.": (
        check_config_keys,
        covered_by("tests/integration/runs/test_documented_runs.py"),
    ),
    r"python -m (examples|integrations)\.": (covered_by("tests/integration/runs/test_documented_runs.py"),),
    "skyrl-train doctor": (covered_by("tests/unit/entrypoints/test_doctor.py"),),
    "skyrl-train engines": (covered_by("tests/unit/entrypoints/test_engines.py"),),
    "skyrl-train env try show_work": (covered_by("tests/integration/quickstart/test_your_environment.py"),),
    "skyrl-train env try right_and_brief": (covered_by("tests/unit/test_get_started_pages.py"),),
    "skyrl-train env try (is_correct|graded|shopping|guess_the_number)": (
        covered_by("tests/integration/environments/test_guide_pages.py"),
    ),
    "skyrl-train env try": (covered_by("tests/integration/environments/test_env_try.py"),),
    r"skyrl-train (report|watch)": (check_run_command, covered_by("tests/unit/entrypoints/test_report_and_watch.py")),
    "skyrl-train export": (check_run_command, covered_by("tests/unit/experiment/test_export.py")),
    "curl ": (covered_by("tests/unit/engines/test_serving_page.py"),),
    r"python -m vllm\.": (native_flags, covered_by("tests/integration/runs/test_documented_runs.py")),
    r"python -m sglang\.": (
        native_flags,
        same_program_as("tests/support/native_servers.py", "with all of its options, which native_flags compares"),
    ),
    "ray job submit": (check_job_submit, covered_by("tests/integration/runs/test_jobs.py")),
    "ray ": (same_program_as("tests/integration/runs/test_jobs.py", "a head, on free ports"),),
    "sbatch ": (untested("needs SLURM; tests/integration/runs/test_clusters.py runs the script under a stand-in"),),
    "sky ": (untested("needs a cloud account; tests/integration/runs/test_clusters.py runs the task's script"),),
    "kubectl ": (untested("needs Kubernetes; the manifest is held by tests/integration/runs/test_clusters.py"),),
    "nft ": (untested("changes the machine's firewall"),),
    r"docker .*(skyrl-train \.$|skyrl-train doctor)": (covered_by("tests/integration/quickstart/test_image.py"),),
    "docker ": (untested("needs an accelerator of NVIDIA's; the Dockerfile is linted by scripts/lint"),),
}
"""Maps the start of a command to its checks and the test that runs it. The first matching row applies."""

SNIPPETS = {
    "docs/concepts/algorithms.md": "tests/unit/algorithms/test_algorithms_page.py",
    "docs/reference/api.md": "tests/integration/api/test_scripts.py",
    "docs/concepts/architecture.md": "tests/unit/algorithms/test_algorithms_page.py",
    "docs/concepts/environments.md": "tests/unit/environments/test_environments_page.py",
    "docs/guides/first_reward.md": "tests/integration/environments/test_guide_pages.py",
    "docs/guides/tool_environment.md": "tests/integration/environments/test_guide_pages.py",
    "docs/guides/foreign_environments.md": "tests/unit/environments/integrations/test_page.py",
    "docs/guides/from_skyrl.md": "tests/integration/runs/test_skyrl_scripts.py",
    "docs/guides/from_trl.md": "tests/unit/test_from_trl_page.py",
    "README.md": "tests/unit/test_get_started_pages.py",
    "docs/get_started/quickstart.md": "tests/unit/test_get_started_pages.py",
    "docs/guides/debugging.md": "tests/unit/test_get_started_pages.py",
    "docs/guides/rollouts.md": "tests/unit/test_api.py",
    "docs/guides/serving.md": "tests/unit/engines/test_serving_page.py",
    "docs/reference/http_api.md": "tests/unit/engines/test_serving_page.py",
    "docs/torchrl/index.md": "tests/unit/tensordict/wrappers/test_page.py",
    "docs/torchrl/collectors.md": "tests/unit/tensordict/collectors/test_page.py",
    "docs/torchrl/environments.md": "tests/unit/tensordict/envs/test_page.py",
    "docs/torchrl/examples.md": "tests/unit/tensordict/envs/test_examples_page.py",
    "docs/torchrl/from_torchrl.md": "tests/unit/tensordict/test_from_torchrl_page.py",
    "docs/torchrl/losses.md": "tests/unit/tensordict/losses/test_page.py",
    "docs/guides/agents.md": "tests/unit/agents/test_agents_page.py",
    "docs/guides/tools.md": "tests/unit/environments/tools/test_pages.py",
    "docs/guides/web_tools.md": "tests/unit/environments/tools/test_pages.py",
    "docs/guides/your_environment.md": "tests/integration/quickstart/test_your_environment.py",
}
"""Maps a page with Python code to the test that runs it."""


def row(command: Command) -> str | None:
    return next((start for start in COMMANDS if re.match(start, str(command))), None)


def test_commands_and_table_rows_match():
    without = [f"{command.page}: {command}" for command in commands() if row(command) is None]
    assert without == [], "add a row to COMMANDS with the test that runs the command, or the reason why none can"
    assert set(COMMANDS) - {row(command) for command in commands()} == set()


def test_every_command_passes_the_checks_of_its_row(monkeypatch: pytest.MonkeyPatch):
    def passes(command: Command) -> None:
        for check in COMMANDS[row(command) or ""]:
            check(command)

    monkeypatch.chdir(REPOSITORY)
    check_each({command.words: command for command in commands()}.values(), passes)


def test_python_pages_are_executed_by_tests():
    assert {page for page, _ in fenced_blocks("python")} == set(SNIPPETS), (
        "add a row to SNIPPETS with the test that runs the page's code"
    )
    for page, test in SNIPPETS.items():
        assert Path(page).name in (REPOSITORY / test).read_text(), f"{test} does not read {page}"


def test_fenced_languages_are_known():
    found = {language for page in ("",) for language in _languages()}
    assert found <= {"bash", "diff", "python", "yaml", "json", "text"}, (
        "check blocks of this language here, or mark them as text"
    )


def _languages() -> set[str]:
    pages = [path.read_text() for path in REPOSITORY.glob("docs/**/*.md")]
    return {language for text in pages for language in re.findall(r"^```(\w*)\n.*?^```", text, re.M | re.S)}


@pytest.mark.parametrize(("page", "text"), fenced_blocks("yaml"))
def test_yaml_snippets_are_valid_configurations(page: str, text: str, tmp_path: Path):
    content = yaml.safe_load(text)
    first = next(iter(content))
    if first.partition(".")[0] in ("trainer", "generator", "environment", "data"):
        (tmp_path / "page.yaml").write_text(f"defaults: [ppo_base_config, _self_]\n{_nested(text, first)}")
        prepare_config(["--config-dir", str(tmp_path), "--config-name", "page"])
    else:
        assert (page, first) in {
            ("docs/reference/metrics.md", "scrape_configs"),
            ("docs/guides/web_tools.md", "servers"),
        }


def _nested(text: str, first: str) -> str:
    """Return nested mappings for `a.b.c:`."""
    *outer, last = first.split(".")
    head = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(outer))
    body = text.replace(f"{first}:", f"{last}:", 1)
    return head + "".join(f"{'  ' * len(outer)}{line}\n" for line in body.splitlines())


def test_json_is_json():
    check_each(fenced_blocks("json"), lambda block: json.loads(block[1]))


def test_commands_are_read_as_a_shell_would():
    text = "export A=1  # why\nA=1 uv run --extra s3 python -m x.y \\\n  a=b && uv run examples/a.py 'c d'\n"
    found = [command.words for command in commands_of("page", text)]
    assert found == [("export", "A=1"), ("python", "-m", "x.y", "a=b"), ("python", "examples/a.py", "c d")]
