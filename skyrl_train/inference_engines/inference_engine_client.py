"""SkyRL's client of the engines, by its name."""

from skyrl_train.skyrl.client import InferenceEngineClient

__all__ = ["InferenceEngineClient"]
