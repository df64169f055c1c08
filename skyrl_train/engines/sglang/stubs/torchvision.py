"""Image transforms: not needed for text."""

from skyrl_train.engines.sglang.stubs import install_stub

__version__ = "0"

install_stub(__name__)
