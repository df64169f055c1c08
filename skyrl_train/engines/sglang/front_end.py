"""The front end of SGLang, which sends requests to the scheduler together. Imports SGLang: see processes.py."""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Any

from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager


class FrontEnd(TokenizerManager):
    """A TokenizerManager that sends all requests of one turn of the event loop as one message.

    With a message for each, an idle scheduler would begin with those that happened to have arrived. Log-probs depend
    on which prompts are computed together, so runs would not repeat bit for bit on CPUs. The order of messages is kept.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._unsent: list[TokenizedGenerateReqInput] = []
        super().__init__(*args, **kwargs)

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        if isinstance(obj, TokenizedGenerateReqInput):
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._send_requests)
            self._unsent.append(copy(obj))  # the caller changes it afterwards
        else:
            self._send_requests()
            super()._dispatch_to_scheduler(obj)

    async def _async_dispatch_to_scheduler(self, obj: Any) -> None:
        self._send_requests()
        await super()._async_dispatch_to_scheduler(obj)

    def _send_requests(self) -> None:
        requests, self._unsent = self._unsent, []
        if len(requests) == 1:
            super()._dispatch_to_scheduler(requests[0])
        elif requests:
            super()._dispatch_to_scheduler(BatchTokenizedGenerateReqInput(batch=requests))
