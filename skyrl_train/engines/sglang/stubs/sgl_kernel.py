"""SGLang's compiled kernels: not needed on a CPU without the AMX build of SGLang."""

from skyrl_train.engines.sglang.stubs import install_stub

__version__ = "0"

install_stub(__name__)
