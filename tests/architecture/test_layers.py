"""Packages import only lower layers, without cycles. Every form of import is parsed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "skyrl_train"
LAYERS = (
    "errors clock imports trace atomic_files log_rotation terminal aio lazy_imports registry metrics listeners "
    "http_server prctl",
    "config",
    "cluster storage data",
    "algorithms environments report models strategies weight_sync",
    "engines rollouts learner trainer agents",
    "experiment",
    "skyrl entrypoints tensordict api register "
    "generators inference_engines utils dataset training_batch fully_async_trainer",
)
INSIDE_TENSORDICT = (
    "chat_templates ragged",
    "history",
    "containers",
    "buffer trl_interop wrappers",
    "envs",
    "losses",
    "collectors",
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
LAZY_TABLES = {"config/choices.py", "__init__.py", "trainer/__init__.py", "utils/__init__.py"}
"""Files whose tables name objects that are loaded on use, long after configuration.

These are not imports of the file.
"""
ONE_IMPORTER = (
    "bm25s",
    "mcp",
    "playwright",
    "wandb",
    "tensorboard",
    "mlflow",
    "trackio",
    "matplotlib",
    "peft",
    "prometheus_client",
    "rich",
    "vllm",
    "sglang",
    "deepspeed",
    "datasets",
    "reasoning_gym",
    "verifiers",
    "py3langid",
    "math_verify",
    "pyseccomp",
    "fsspec",
    "jsonschema",
    "referencing",
    "regex",
)
OUR_MODULE = re.compile(r"skyrl_train(\.\w+)+(:\w+)?")


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module) for every import in a module of `package`.

    This covers statements in any place, relative imports, names passed to importlib, and any text that looks like a
    module of this package, such as the arguments of `load_object` and `spawn`.
    """
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and _loads_a_module(node.func):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value
        elif isinstance(node, ast.Constant) and id(node) not in docstrings and OUR_MODULE.fullmatch(str(node.value)):
            yield node.lineno, str(node.value).replace(":", ".")


def _loads_a_module(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__", "find_spec", "importorskip")


def modules() -> Iterator[tuple[Path, str, str, str]]:
    """Yield (path, name below the package, layer, package) for every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        package = ".".join(["skyrl_train", *inside.parts[:-1]])
        yield path, inside.as_posix(), inside.parts[0].removesuffix(".py"), package


@cache
def all_imports() -> list[tuple[str, str, int, str]]:
    """Return (file, layer, line, imported module) over the whole package."""
    return [
        (name, layer, line, module)
        for path, name, layer, package in modules()
        for line, module in imported(path.read_text(), package)
    ]


def imports_between_packages() -> Iterator[tuple[str, str, int, str]]:
    """Yield the imports between packages, without tables of names that are loaded on use."""
    for name, layer, line, module in all_imports():
        parts = module.split(".")
        ours = parts[0] == "skyrl_train" and len(parts) > 1 and parts[1] not in (layer, "__version__")
        if ours and layer != "testing" and name not in LAZY_TABLES:
            yield name, layer, line, module


@pytest.mark.parametrize(
    "source",
    [
        "import skyrl_train.trainer.trainer",
        "import skyrl_train.trainer as t",
        "from skyrl_train import trainer",
        "from skyrl_train.trainer import trainer",
        "from .. import trainer",
        "from ..trainer.trainer import Trainer",
        "def f():\n    from ..trainer import trainer",
        "import importlib\nimportlib.import_module('skyrl_train.trainer')",
        "__import__('skyrl_train.trainer')",
        "spawn('skyrl_train.trainer.trainer:Trainer')",
    ],
)
def test_every_form_of_import_is_seen(source: str):
    assert any(module.startswith("skyrl_train.trainer") for _, module in imported(source, "skyrl_train.data"))


def test_architecture_page_lists_these_layers():
    page = (PACKAGE.parent / "docs" / "concepts" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (`[^|]+`) \|", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(LAYERS) + 1))
    assert [set(re.findall(r"`(\w+)`", names)) for _, names in rows] == [set(names.split()) for names in LAYERS]


def test_every_module_belongs_to_a_layer():
    known = {*LEVEL, "testing", "__init__"}
    assert {layer for _, _, layer, _ in modules()} <= known


def test_imports_never_go_up():
    wrong = [
        f"{name}:{line} imports {module}"
        for name, layer, line, module in imports_between_packages()
        if LEVEL.get(module.split(".")[1], len(LAYERS)) > LEVEL[layer]
    ]
    assert wrong == []


def test_no_import_cycles_between_packages():
    graph: dict[str, set[str]] = {}
    for _, layer, _, module in imports_between_packages():
        graph.setdefault(layer, set()).add(module.split(".")[1])
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_tensordict_side_has_layers_too():
    level = {name: level for level, names in enumerate(INSIDE_TENSORDICT) for name in names.split()}
    wrong = []
    for name, layer, line, module in all_imports():
        here, there = name.removesuffix(".py").split("/")[1:2], module.split(".")[2:3]
        if layer != "tensordict" or here == ["__init__"] or not module.startswith("skyrl_train.tensordict."):
            continue
        if here != there and level.get(there[0], len(level)) >= level[here[0]]:
            wrong.append(f"{name}:{line} imports {module}")
    assert wrong == []


def test_the_core_never_imports_tensordict():
    wrong = [
        f"{name}:{line}"
        for name, layer, line, module in all_imports()
        if layer != "tensordict" and "tensordict" in module.split(".")[:2]
    ]
    assert wrong == []


def test_package_does_not_import_testing():
    wrong = [
        f"{n}:{line}"
        for n, layer, line, m in all_imports()
        if layer != "testing" and m.startswith("skyrl_train.testing")
    ]
    assert wrong == []


def test_only_cluster_imports_ray():
    wrong = [f"{n}:{line}" for n, layer, line, m in all_imports() if m.split(".")[0] == "ray" and layer != "cluster"]
    assert wrong == []


def test_nothing_imports_what_hydra_keeps_for_itself():
    assert [f"{n}:{line}" for n, _, line, m in all_imports() if m.startswith("hydra._internal")] == []


def test_each_optional_library_has_one_importer():
    """An importer is one file, or all files whose names begin with the name of the engine."""
    wrong = []
    for library in ONE_IMPORTER:
        files = {name for name, _, _, module in all_imports() if library in (module.split(".")[0], module)}
        if len(files) > 1 and not all(name.startswith(f"engines/{library}") for name in files):
            wrong.append(f"{library} is imported by {', '.join(sorted(files))}")
    assert not wrong, "\n".join(wrong)


def test_only_tensordict_imports_torchrl():
    """The extra `torchrl` brings torchrl and tensordict, which nothing else may require."""
    imports = ((name, module.split(".")[0]) for name, _, _, module in all_imports())
    found = {name for name, library in imports if library in ("torchrl", "tensordict")}
    assert all(name.startswith("tensordict/") for name in found), found


def test_packages_export_nothing_by_themselves():
    """Importing `data.trajectory` must not import torch through `data/__init__`."""
    for path, name, _, _ in modules():
        # Stand-ins are packages of other people's names, never imported under ours; what is public, or
        # SkyRL's name for something, is loaded lazily.
        public = ("__init__.py", "tensordict/__init__.py", "trainer/__init__.py", "utils/__init__.py")
        if path.name == "__init__.py" and name not in public and "stubs" not in name:
            statements = [n for n in ast.parse(path.read_text()).body if not isinstance(n, ast.Expr)]
            assert statements == [], name


LOADED = """
import importlib.util, pkgutil, sys
import skyrl_train.{package} as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    library = module.name.rpartition(".")[2]
    if library not in ("mlflow", "trackio") or importlib.util.find_spec(library):  # extras
        importlib.import_module(module.name)
loaded = {{name.split(".")[0] for name in sys.modules}}
heavy = loaded & {{"torch", "ray", "transformers", "datasets", "vllm", "sglang"}}
assert not heavy, heavy
"""


@pytest.mark.parametrize("package", ["config", "environments", "report"])
def test_light_packages_import_no_heavy_library(package: str):
    code = LOADED.format(package=package)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]


def test_trajectories_need_no_torch():
    code = "import sys, skyrl_train.data.trajectory; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_driver_does_not_import_peft():
    """The import takes a second, and only ranks that train adapters or build a schedule need it."""
    code = "import sys, skyrl_train.experiment.trainer; assert 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
