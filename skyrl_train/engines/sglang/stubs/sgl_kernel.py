"""Stub of SGLang's compiled kernels, which it does not need on a CPU, except in its AMX build."""

from skyrl_train.engines.sglang.stubs import install_stub

__version__ = "0"

install_stub(__name__)
