"""SkyRL's import path of its inference engine client."""

from skyrl_train.skyrl.client import InferenceEngineClient

__all__ = ["InferenceEngineClient"]
