"""Check an installed engine: names, signatures, imports, and its start."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from unittest.mock import patch

import torch

from tests.cuda_wheels import names, start, touched
from tests.gpu_check.environment import OPTIONAL, import_module, modules
from tests.gpu_check.report import Missing

Check = tuple[str, str, Callable[[], object]]
"""The file, a description, and a function that raises an exception if the check fails."""


def checks_of_names(engine: str) -> Iterator[Check]:
    """Yield the checks of all names that skyrl_train uses of an engine, torch and transformers."""
    for root in (engine, "torch", "transformers"):
        rows = [*touched.rows(getattr(names, root.upper())), *touched.imported(root)]
        if root == "torch" and torch.version.cuda:
            rows += touched.rows(names.CUDA)
        for file, row in rows:
            yield file, ast.unparse(row), lambda row=row: check_name(row)  # type: ignore[misc]
    for ours, theirs in names.REPLACED.items():
        if theirs.startswith(engine):
            yield (
                file_of(ours.rpartition(".")[0]),
                f"{ours.rpartition('.')[2]} replaces {theirs}",
                lambda ours=ours, theirs=theirs: touched.check_override(  # type: ignore[misc]
                    touched.find(ours), touched.find(theirs), by_name=False
                ),
            )


def check_name(row: ast.expr) -> None:
    """Check a row of names.py. FlashAttention-4 reads the GPU's compute capability when it is imported."""
    with patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        touched.check(row)


def checks_of_overrides(engine: str) -> Iterator[Check]:
    """Yield the checks of methods that override those of an engine's classes."""
    for name in modules():
        if not name.startswith(f"skyrl_train.engines.{engine}."):
            continue
        module = importlib.import_module(name)
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == name:
                for method, ours, theirs in touched.overridden(kind, engine):
                    yield (
                        file_of(name),
                        f"override {kind.__name__}.{method}",
                        lambda ours=ours, theirs=theirs: touched.check_override(ours, theirs),  # type: ignore[misc]
                    )


def checks_of_imports(engine: str) -> Iterator[Check]:
    """Yield a check of the import of every module. Modules that need another engine or an extra may fail."""

    def imported(name: str) -> None:
        try:
            import_module(name, OPTIONAL - {engine})
        except Missing:
            if name.startswith(f"skyrl_train.engines.{engine}"):
                raise

    for name in modules():
        yield "every module", name, lambda name=name: imported(name)  # type: ignore[misc]


def checks_of_starts(engine: str) -> Iterator[Check]:
    """Yield checks that start the engine with our arguments, each in a separate process, up to the missing driver."""
    for case in start.CASES[engine]:
        yield "start", f"{engine} {case}", lambda case=case: start.reaches_the_driver(engine, case)  # type: ignore[misc]


def file_of(module: str) -> str:
    return module.removeprefix("skyrl_train.").replace(".", "/") + ".py"


def run(checks: Iterator[Check]) -> bool:
    """Run checks, and print a table with a row per file and a line per failure; return True if all passed."""
    counts: Counter[str] = Counter()
    failures: list[tuple[str, str, str]] = []
    for file, description, check in checks:
        counts[file] += 1
        try:
            check()
        except Exception as error:  # An import or a start may raise anything.
            failures.append((file, description, f"{type(error).__name__}: {error}"))
    print("| file | checked | failed |", "| --- | --- | --- |", sep="\n")
    for file, count in counts.items():
        print(f"| {file} | {count} | {sum(file == failed for failed, *_ in failures) or ''} |")
    for file, description, problem in failures:
        print(f"MISS {file}: {description}: {problem}")
    print(f"{counts.total()} checked, {len(failures)} failed", flush=True)
    return not failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_wheels.check", description=__doc__)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument(
        "--names", action="store_true", help="check only names and signatures, which also works with a CPU build"
    )
    arguments = parser.parse_args()
    if arguments.engine == "sglang" and find_spec("torchvision") is None:
        sys.path.insert(0, str(touched.PACKAGE / "engines/sglang/stubs"))
    kinds: list[Callable[[str], Iterator[Check]]] = [checks_of_names, checks_of_overrides]
    if not arguments.names:
        kinds += [checks_of_imports, checks_of_starts]
    return 0 if run(check for kind in kinds for check in kind(arguments.engine)) else 1


if __name__ == "__main__":
    sys.exit(main())
