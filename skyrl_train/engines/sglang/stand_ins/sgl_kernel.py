"""SGLang's compiled kernels: not needed on a CPU without the AMX build of SGLang."""

from skyrl_train.engines.sglang.stand_ins import stand_in

__version__ = "0"

stand_in(__name__)
