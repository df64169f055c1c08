"""What SkyRL's client of the engines takes and returns, by its names."""

from skyrl_train.skyrl.interface import ConversationType, InferenceEngineInput, InferenceEngineOutput, MessageType

__all__ = ["ConversationType", "InferenceEngineInput", "InferenceEngineOutput", "MessageType"]
