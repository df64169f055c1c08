"""The training loop and its parts. Also exports SkyRL's `RayPPOTrainer` under its import path."""

from skyrl_train.lazy_imports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"skyrl_train.skyrl.trainer": ("RayPPOTrainer",)})
