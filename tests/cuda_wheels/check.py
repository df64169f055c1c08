"""`python -m tests.cuda_wheels.check ENGINE`, where it is installed: names, signatures, imports, and its start."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch

from tests.cuda_wheels import names, start, touched
from tests.gpu_check.environment import OPTIONAL, attempt, modules
from tests.gpu_check.report import Missing

Check = tuple[str, str, Callable[[], object]]
"""File, what is checked, and the check: it raises an exception if that is not as it must be."""


def checks_of_names(engine: str) -> Iterator[Check]:
    """What our code touches of an engine, torch and transformers."""
    for root in (engine, "torch", "transformers"):
        of_root = [*touched.rows(getattr(names, root.upper())), *touched.imported(root)]
        if root == "torch" and torch.version.cuda:
            of_root += touched.rows(names.CUDA)
        for file, row in of_root:
            yield file, ast.unparse(row), lambda row=row: touched.check(row)  # type: ignore[misc]
    for ours, theirs in names.REPLACED.items():
        if theirs.startswith(engine):
            yield (
                file_of(ours.rpartition(".")[0]),
                f"{ours.rpartition('.')[2]} in the place of {theirs}",
                lambda ours=ours, theirs=theirs: touched.check_override(  # type: ignore[misc]
                    touched.find(ours), touched.find(theirs), by_name=False
                ),
            )


def checks_of_overrides(engine: str) -> Iterator[Check]:
    """Methods of our subclasses of an engine's classes."""
    for name in modules():
        if not name.startswith(f"skyrl_train.engines.{engine}."):
            continue
        module = importlib.import_module(name)
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == name:
                for method, ours, theirs in touched.overridden(kind, engine):
                    yield (
                        file_of(name),
                        f"{kind.__name__}.{method}, overridden",
                        lambda ours=ours, theirs=theirs: touched.check_override(ours, theirs),  # type: ignore[misc]
                    )


def checks_of_imports(engine: str) -> Iterator[Check]:
    """Every module of ours; what needs the other engine, or what nobody asked for, may be missing."""

    def imported(name: str) -> None:
        try:
            attempt(name, OPTIONAL - {engine})
        except Missing:
            if name.startswith(f"skyrl_train.engines.{engine}"):
                raise

    for name in modules():
        yield "every module", name, lambda name=name: imported(name)  # type: ignore[misc]


def checks_of_starts(engine: str) -> Iterator[Check]:
    """The engine with our arguments, up to the missing driver, each in a process of its own."""
    for case in start.CASES:
        yield "start", f"{engine} {case}", lambda case=case: start.reaches_the_driver(engine, case)  # type: ignore[misc]


def file_of(module: str) -> str:
    return module.removeprefix("skyrl_train.").replace(".", "/") + ".py"


def run(checks: Iterator[Check]) -> bool:
    """Do them, and print a table: a row a file, and a row for everything that is not as it must be."""
    done: Counter[str] = Counter()
    missed: list[tuple[str, str, str]] = []
    for file, what, check in checks:
        done[file] += 1
        try:
            check()
        except Exception as error:  # whatever an import or a start raises
            missed.append((file, what, f"{type(error).__name__}: {error}"))
    print("| where | checked | not as it must be |", "| --- | --- | --- |", sep="\n")
    for file, count in done.items():
        print(f"| {file} | {count} | {sum(file == one for one, *_ in missed) or ''} |")
    for file, what, problem in missed:
        print(f"MISS {file}: {what}: {problem}")
    print(f"{done.total()} checked, {len(missed)} not as they must be", flush=True)
    return not missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_wheels.check", description=__doc__)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("--names", action="store_true", help="only names and signatures: on a CPU build too")
    given = parser.parse_args()
    if given.engine == "sglang" and find_spec("torchvision") is None:
        sys.path.insert(0, str(touched.PACKAGE / "engines/sglang/stubs"))
    kinds: list[Callable[[str], Iterator[Check]]] = [checks_of_names, checks_of_overrides]
    if not given.names:
        kinds += [checks_of_imports, checks_of_starts]
    return 0 if run(check for kind in kinds for check in kind(given.engine)) else 1


if __name__ == "__main__":
    sys.exit(main())
