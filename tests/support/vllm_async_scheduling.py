"""vLLM's async scheduling on a CPU, whose platform turns it off. The queue of pending steps is that of a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch


class _NoStream:
    """A stand-in for a CUDA stream and event. On a CPU every step has ended when it returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def enable_async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines that start later begin a step before they have the tokens of the previous step."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
    monkeypatch.setattr(torch.cuda, "Event", _NoStream)
    monkeypatch.setattr(torch.cuda, "Stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
