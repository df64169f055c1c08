"""Stub of torchvision, whose image transforms text models do not need."""

from skyrl_train.engines.sglang.stubs import install_stub

__version__ = "0"

install_stub(__name__)
