"""Packages that SGLang imports on a CPU without ever calling them: its compiled kernels, and torchvision.

Only an engine's processes have the folder on their path (see ../host.py). Any name can be imported from its modules;
calling one raises.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class StubObject:
    """A stand-in for a missing object; all of its attributes are missing, too."""

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, name: str) -> StubObject:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubObject(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is not installed: SGLang was not expected to call it on a CPU.")


class _Submodules(MetaPathFinder, Loader):
    """Finds a module of any name below one package."""

    def __init__(self, package: str):
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _fill(module)


def install_stub(package: str) -> None:
    """Make the module that is being imported a package in which every name exists."""
    _fill(sys.modules[package])
    sys.meta_path.append(_Submodules(package))


def _fill(module: ModuleType) -> None:
    def get(name: str) -> StubObject:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubObject(f"{module.__name__}.{name}")

    module.__path__ = []
    module.__getattr__ = get  # type: ignore[method-assign]
