"""SkyRL's import path of its helper functions for scripts."""

from skyrl_train.lazy_imports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "skyrl_train.skyrl.script_entry": ("SkyRLTrainConfig", "initialize_ray", "validate_cfg"),
        "skyrl_train.skyrl.metrics": ("Timer",),
    },
)
