"""The training loop; and SkyRL's trainer, by its name, over it."""

from skyrl_train.lazy_imports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"skyrl_train.skyrl.trainer": ("RayPPOTrainer",)})
