"""Image transforms: not needed for text."""

from skyrl_train.engines.sglang.stand_ins import stand_in

__version__ = "0"

stand_in(__name__)
