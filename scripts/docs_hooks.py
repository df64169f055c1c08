"""Hooks of mkdocs for what plain Markdown pages cannot say themselves.

- Each `examples/NAME/README.md` becomes the page `recipes/NAME.md`. `examples/README.md` is the overview of the tab
  Recipes; its headings and links decide the groups and the order.
- Links between pages, recipes and other files work in the repository and on the site. Source files become links to the
  repository if its URL is known, and plain text otherwise.
- The repository's URL comes from the environment variable DOCS_REPOSITORY, or from git's remote `origin`.
- The version comes from pyproject.toml.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
BRANCH = "main"
RECIPES = {
    f"recipes/{path.parent.name}.md": path.relative_to(REPOSITORY).as_posix()
    for path in sorted(REPOSITORY.glob("examples/*/README.md"))
} | {"recipes/index.md": "examples/README.md"}
"""Maps a page of the Recipes tab to its file in the repository."""
_PAGES = {source: page for page, source in RECIPES.items()} | {
    posixpath.dirname(source): page for page, source in RECIPES.items()
}
"""Maps a README of the examples, or its folder, to its page."""
_LINK_OR_CODE = re.compile(
    r"^ *(?P<fence>```|~~~).*?^ *(?P=fence) *$|`[^`\n]+`"
    r"|(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
_LATER_CELL = re.compile(r"(?<=</td>\n)<td.*?</td>", re.DOTALL)
"""A cell of a table, unless it is the first of its row."""
_LONG_CODE = re.compile(r"(?<=<code>)[^<]{20,}(?=</code>)")
"""Code that is too long for a narrow column."""
_BREAK = re.compile(r"(?<=\w)[_./=,](?=\w)")
"""Where long keys, paths and formulas may break."""
_REMOTE = re.compile(
    r"(?:https?://(?:[^@/]+@)?(?P<web>[\w.:-]+)/|ssh://(?:[^@/]+@)?(?P<ssh>[\w.-]+)(?::\d+)?/|[\w.-]+@(?P<scp>[\w.-]+):)"
    r"(?P<path>.+?)(?:\.git)?/?"
)
"""Addresses of git remotes. User names and passwords are not part of the result."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set repository, version and the pages of the Recipes tab."""
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    config.copyright = f"skyrl-train {version} · Apache-2.0"
    config.extra["version"] = version
    config.extra_css.append("assets/version.css")
    config.repo_url = repository_url()
    if config.repo_url:
        config.repo_name = config.repo_url.split("/", 3)[3]
        config.edit_uri = f"{_host_prefix(config.repo_url)}edit/{BRANCH}/docs/"
    for entry in config.nav or []:
        if isinstance(entry, dict) and "Recipes" in entry:
            entry["Recipes"] = recipe_navigation()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the recipes, and a style sheet that shows the version next to the name."""
    for page, source in RECIPES.items():
        file = File.generated(config, page, abs_src_path=str(REPOSITORY / source))
        file.edit_uri = f"../{source}"
        files.append(file)
    version = f'.md-header__topic:first-child .md-ellipsis::after {{ content: "{config.extra["version"]}" }}\n'
    files.append(File.generated(config, "assets/version.css", content=version))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that lead out of `docs`, and all links of recipes."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    return rewrite_links(markdown, page.file.src_uri, config.repo_url)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Wrap the landing page for the style sheet, and allow line breaks in code of tables."""
    if page.is_homepage:
        return f'<div class="landing">{html}</div>'
    if _has_keys(page):
        _shorten_titles(page)
    return _LATER_CELL.sub(lambda cell: _LONG_CODE.sub(_with_breaks, cell[0]), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Mark pages of keys for the style sheet. A wrapper would hide their first heading from the search."""
    content = "md-content__inner md-typeset"
    return output.replace(content, f"{content} keys", 1) if _has_keys(page) else output


def _has_keys(page: Page) -> bool:
    return page.file.src_uri.startswith("reference/configuration/")


def _with_breaks(code: re.Match[str]) -> str:
    return _BREAK.sub(r"\g<0><wbr>", code[0])


def _shorten_titles(page: Page) -> None:
    """Show sections of a section without its name in the table of contents: `.kl_ctrl` below `trainer.algorithm`."""
    above = ""
    for link in (section for title in page.toc for section in title.children):
        if above and link.title.startswith(f"{above}."):
            link.title = link.title.removeprefix(above)
        else:
            above = link.title


def repository_url() -> str | None:
    """Return the https URL of the repository without a trailing slash, or None if it is not known."""
    url = os.environ.get("DOCS_REPOSITORY", "")
    if not url:
        command = ["git", "-C", str(REPOSITORY), "remote", "get-url", "origin"]
        try:
            url = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:  # git is not installed
            url = ""
    found = _REMOTE.fullmatch(url)
    return f"https://{found['web'] or found['ssh'] or found['scp']}/{found['path']}" if found else None


def rewrite_links(markdown: str, page: str, repository: str | None) -> str:
    """Return a page's text with links that work on the site.

    Args:
        markdown: Text of the page.
        page: Path of the page on the site, such as guides/tools.md.
        repository: URL of the repository, or None.
    """

    def rewrite(found: re.Match[str]) -> str:
        target, mark, anchor = (found["target"] or "").partition("#")
        if not target or "://" in target or target.startswith(("/", "mailto:")):
            return found[0]  # code, or a link that does not depend on the page
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        path = f"docs/{_PAGES[path]}" if path in _PAGES else path
        if path.startswith("docs/"):
            to = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(page) or ".")
        elif not (REPOSITORY / path).exists():
            return found[0]  # mkdocs reports it
        elif repository is None:
            return found["text"]
        else:
            kind = "tree" if (REPOSITORY / path).is_dir() else "blob"
            to = f"{repository}/{_host_prefix(repository)}{kind}/{BRANCH}/{path}"
        return f"{found['image']}[{found['text']}]({to}{mark}{anchor})"

    source = RECIPES.get(page, f"docs/{page}")
    return _LINK_OR_CODE.sub(rewrite, markdown)


def _host_prefix(repository: str) -> str:
    """Return what precedes `edit`, `blob` and `tree` in addresses of the repository's host."""
    return "-/" if "gitlab" in repository.split("/")[2] else ""


def recipe_navigation() -> list[str | dict[str, list[str]]]:
    """Return the overview, then the recipes under its headings, then those that no heading has."""
    overview = (REPOSITORY / RECIPES["recipes/index.md"]).read_text(encoding="utf-8")
    intro, *sections = re.split(r"^## (.+)$", overview, flags=re.MULTILINE)
    navigation: list[str | dict[str, list[str]]] = ["recipes/index.md"]
    listed = {"recipes/index.md"}

    def unlisted(pages: Iterable[str]) -> list[str]:
        found = [page for page in dict.fromkeys(pages) if page in RECIPES and page not in listed]
        listed.update(found)
        return found

    for heading, text in zip(sections[::2], sections[1::2], strict=True):
        if pages := unlisted(_linked_recipes(text)):
            navigation.append({heading: pages})
    return navigation + unlisted([*_linked_recipes(intro), *RECIPES])


def _linked_recipes(text: str) -> list[str]:
    return [f"recipes/{name}.md" for name in re.findall(r"\]\(([\w.-]+)/README\.md", text)]
