"""Stubs of packages that SGLang imports on a CPU without calling them: its compiled kernels, and torchvision.

Only the processes of an SGLang engine have this folder on their path (see ../processes.py). Any name can be imported
from the stubs. Calling one raises NotImplementedError.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class StubObject:
    """A stub of an object that is not installed. Its attributes are stubs. Calling it raises NotImplementedError."""

    def __init__(self, name: str):
        """Create a stub for the object with the qualified name `name`."""
        self.__name__ = name

    def __getattr__(self, name: str) -> StubObject:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubObject(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.__name__} is a stub that SGLang is not expected to call on a CPU. Install the package that has it, "
            "or set generator.backend=vllm or generator.backend=transformers."
        )


class _Submodules(MetaPathFinder, Loader):
    """A finder that creates a stub module for every name below one package."""

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
    """Turn a module into a package in which every name and every submodule exists.

    Args:
        package: Name of the module, which calls this while it is imported.
    """
    _fill(sys.modules[package])
    sys.meta_path.append(_Submodules(package))


def _fill(module: ModuleType) -> None:
    def get(name: str) -> StubObject:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubObject(f"{module.__name__}.{name}")

    module.__path__ = []
    module.__getattr__ = get  # type: ignore[method-assign]
