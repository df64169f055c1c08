"""Commands, paths and code in the documentation are real."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENTRYPOINT = re.compile(r"-m skyrl_train\.entrypoints\.(\w+)((?: .*)?)")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block in a language."""
    return [
        (page.relative_to(REPOSITORY).as_posix(), text)
        for page in PAGES
        for found, text in FENCE.findall(page.read_text())
        if found == language
    ]


def commands() -> list[tuple[str, str]]:
    """(page, arguments) of every call of an entrypoint with keys, comments and continued lines resolved."""
    found = []
    for page, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            match = ENTRYPOINT.search(line)
            arguments = shlex.split(match[2], comments=True) if match else []
            if arguments and not arguments[0].startswith("-"):
                found.append((page, shlex.join(arguments)))
    return sorted(set(found))


def test_there_are_commands_to_check():
    assert len(commands()) >= 3


@pytest.mark.parametrize(("page", "arguments"), commands())
def test_a_documented_command_line_is_a_good_configuration(page: str, arguments: str):
    result = subprocess.run(
        [sys.executable, "-m", "skyrl_train.entrypoints.check_config", "--elsewhere", *shlex.split(arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_documented_scripts_exist_and_can_be_run():
    for page, text in blocks("bash"):
        for name in re.findall(r"(?:^|\s)((?:scripts|\.ci)/[\w.]+)", text):
            assert (REPOSITORY / name).stat().st_mode & 0o111, f"{page}: {name}"
        for name in re.findall(r"\s(examples/[\w./]+)", text):
            assert (REPOSITORY / name).is_file(), f"{page}: {name}"


def test_links_between_pages_lead_somewhere():
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in LINK.findall(FENCE.sub("", page.read_text()))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_in_the_documentation_imports_what_exists(page: str, code: str):
    imports: list[ast.stmt] = [n for n in ast.parse(code).body if isinstance(n, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), page, "exec"), {})


def test_the_layout_in_the_readme_names_every_package():
    readme = (REPOSITORY / "README.md").read_text()
    packages = {path.name for path in (REPOSITORY / "skyrl_train").iterdir() if (path / "__init__.py").is_file()}
    assert {name for name in packages if f"\n  {name}/ " not in readme} == set()


def test_every_page_is_in_the_navigation():
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if page.parent.name == "docs" and f" {page.name}" not in navigation] == []
