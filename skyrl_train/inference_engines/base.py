"""SkyRL's import path of the types that its inference engine client takes and returns."""

from skyrl_train.skyrl.interface import ConversationType, InferenceEngineInput, InferenceEngineOutput, MessageType

__all__ = ["ConversationType", "InferenceEngineInput", "InferenceEngineOutput", "MessageType"]
