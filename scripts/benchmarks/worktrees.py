"""Source trees of two commits, for benchmarks that compare them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import HERE


@contextmanager
def trees(against: str | None) -> Iterator[dict[str, Path]]:
    """Yield source trees by name: this one as "now", and a temporary worktree of `against` if it is given."""
    here = HERE.parents[1]
    if against is None:
        yield {"now": here}
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", str(here), "worktree", "add", "--detach", str(tree), against], check=True)
        try:
            yield {against: tree, "now": here}
        finally:
            subprocess.run(["git", "-C", str(here), "worktree", "remove", "--force", str(tree)], check=True)
