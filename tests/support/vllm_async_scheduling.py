"""vLLM's async scheduling on a CPU, whose platform turns it off: the queue of steps under way is the same."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch


class _NoStream:
    """What vLLM uses of a stream and of an event; on a CPU every step has ended when it returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def enable_async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines started from now on begin a step before they have the tokens of the one before."""
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
