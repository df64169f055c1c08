"""A further node of a vLLM engine: ranks of its model, which the scheduler on the engine's first node leads."""

from __future__ import annotations

import asyncio
from typing import Any

import skyrl_train.engines.vllm.engine  # noqa: F401  says how vLLM is to be imported

# isort: split
import vllm
from vllm import EngineArgs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from skyrl_train.engines.vllm.arguments import bind_threads, engine_arguments
from skyrl_train.engines.vllm.capabilities import vllm_capabilities
from skyrl_train.errors import ConfigError


class VLLMWorkerNode:
    """What `vllm serve --headless` is: the processes of these ranks, which do what the first node's scheduler says.

    They wait for it for as long as it may think, so whoever starts this ends it together with the engine.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        name: str = "vllm",
        threads: int | None = None,
        slot: int = 0,
        max_lora_rank: int = 0,
        max_model_len: int | None = None,
        **engine_args: Any,
    ):
        """Takes what VLLMEngine takes, which must be the same on all nodes but for `node_rank` (1 to nnodes - 1).

        Blocks until the ranks of all nodes have loaded the model. Raises ConfigError for what vLLM refuses.
        """
        on_cpu = device == "cpu"
        arguments = engine_arguments(model, on_cpu, max_lora_rank, {"max_model_len": max_model_len, **engine_args})
        ranks = arguments["tensor_parallel_size"]
        self.capabilities = vllm_capabilities(name, ranks, max_lora_rank)
        bind_threads(threads, ranks // arguments["nnodes"], on_cpu)
        try:
            config = EngineArgs(**arguments).create_engine_config(headless=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Engine {name!r}: vLLM {vllm.__version__} refuses to start: {error}") from error
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    async def ended(self) -> None:
        """Returns once one of the ranks has ended, and has ended the others."""
        await asyncio.to_thread(self._executor.start_worker_monitor, inline=True)
