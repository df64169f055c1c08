"""Links, names and imports in the documentation are real; test_commands.py has its commands and snippets."""

from __future__ import annotations

import ast
import pkgutil
import re

import tests.support.torchrl  # noqa: F401 - before a page imports torchrl with its warnings
from skyrl_train.config.keys import find_key
from skyrl_train.report.metric_catalog import metric_of
from tests.support.doc_pages import FENCE, PAGES, REPOSITORY, fenced_blocks
from tests.support.table_cases import check_each

SYMPTOM_PAGES = ("first_reward", "kl_and_entropy", "reward_stays_zero", "tool_environment")
KEY_IN_PROSE = re.compile(r"`'?((?:trainer|generator|data|environment)\.[\w.]+)")
METRIC_IN_PROSE = re.compile(
    r"`((?:policy|reward|response|rollouts|mismatch|async|advantages|weights|eval|episode)/\w[\w/]*)`"
)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
NAME = re.compile(r"(?<![\w.])skyrl_train(?:\.[A-Za-z_]\w*)+")


def test_links_between_pages_lead_somewhere():
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in LINK.findall(FENCE.sub("", page.read_text()))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def run_imports(block: tuple[str, str]) -> None:
    page, code = block
    imports: list[ast.stmt] = [n for n in ast.parse(code).body if isinstance(n, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), page, "exec"), {})


def test_documented_python_imports_what_exists():
    check_each(fenced_blocks("python"), run_imports)


def test_documented_names_of_this_package_exist():
    found = {(page.name, name) for page in PAGES for name in NAME.findall(page.read_text())}
    check_each(sorted(found), lambda found: _is_written(found[1]) or pkgutil.resolve_name(found[1]))


def test_guides_name_existing_keys_and_metrics():
    for page in SYMPTOM_PAGES:
        text = (REPOSITORY / "docs" / "guides" / f"{page}.md").read_text()
        metrics = {name: metric_of(name) for name in METRIC_IN_PROSE.findall(text)}
        assert [key for key in KEY_IN_PROSE.findall(text) if find_key(key) is None] == []
        assert [name for name, found in metrics.items() if found is None or "{name}" in found.name] == []


def _is_written(name: str) -> bool:
    """True if `name` is a file or an object defined in one. Engines need not be imported for the check."""
    module, _, last = name.rpartition(".")
    whole, outer = (REPOSITORY.joinpath(*one.split(".")) for one in (name, module))
    if (whole / "__init__.py").is_file() or whole.with_suffix(".py").is_file():
        return True
    file = outer.with_suffix(".py")
    body = ast.parse(file.read_text()).body if file.is_file() else []
    return any(isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == last for one in body)


def test_layout_in_contributing_names_every_package():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    packages = {path.name for path in (REPOSITORY / "skyrl_train").iterdir() if (path / "__init__.py").is_file()}
    assert {name for name in packages if f"\n  {name}/ " not in text} == set()


def test_every_page_is_in_the_navigation():
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    docs = REPOSITORY / "docs"
    pages = [page.relative_to(docs).as_posix() for page in PAGES if page.is_relative_to(docs)]
    assert [page for page in pages if f" {page}\n" not in navigation] == []


def test_pages_are_plain_markdown_that_any_reader_shows():
    """Theme-specific markup is noise in other renderers. Only docs/reference/api_*.md have mkdocstrings' `:::`."""
    marks = re.compile(
        r"^(?:!!! |\?\?\?\+? |=== \"|--8<--)|\{[:.#][ \w.#=-]*\}|:(?:material|octicons|fontawesome)-", re.MULTILINE
    )
    found = {page.name: marks.findall(FENCE.sub("", re.sub(r"`[^`\n]*`", "", page.read_text()))) for page in PAGES}
    assert {name: marks for name, marks in found.items() if marks} == {}
