"""TorchRL's schemes of weight updates to vLLM and SGLang, with verified updates of this project's engines.

A sender gives the engine the complete weights, and checks what has arrived (weight_sync/sync.py). It chooses the
connection itself: the addresses, ranks and devices of a scheme are accepted, but not needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from torchrl.weight_update import llm

from skyrl_train.tensordict.collectors.weight_updaters import EngineUpdater, engines_of, find_engines
from skyrl_train.tensordict.wrappers.sglang_server import AsyncSGLang
from skyrl_train.tensordict.wrappers.weight_sync import Metadata, Source, check_metadata, get_model_metadata, weights_of

get_sglang_model_metadata = get_model_metadata


class _VerifiedSender:
    """The part of a sender that both backends share: the model, the collectors, and an updater of the engine."""

    _collectors: list[Any]
    _updater: EngineUpdater | None = None
    _model_ref: Any
    _model_metadata: Metadata | None

    def register_collector(self, collector: Any) -> None:
        """Register a collector, which does not sample during an update and counts it as a version."""
        self._collectors.append(collector)
        if self._updater is not None:
            self._updater.register_collector(collector)

    def update_weights(self, weights: Source | None = None) -> None:
        """Send weights, by default the registered model's, to the engine; blocks until they have arrived.

        Raises:
            RuntimeError: `init_all_workers_group` was not called, or there is no model.
            ConfigError: The weights differ from the metadata.
            WeightSyncError: The weights did not arrive intact. The message names the engine and the tensor.
        """
        if self._updater is None:
            raise RuntimeError("Transport not initialized. Call init_all_workers_group first.")
        if weights is None and self._model_ref is not None:
            weights = self._model_ref()
        if weights is None:
            raise RuntimeError("No model registered and no weights provided. Call register_model first.")
        tensors = weights_of(weights)
        if self._model_metadata:
            check_metadata(tensors, self._model_metadata)
        self._updater.push_weights(tensors)

    def shutdown(self) -> None:
        """Close the connection to the engine, and forget the collectors."""
        updater, self._updater = self._updater, None
        if updater is not None:
            updater.close()
        self._collectors.clear()

    def _connect(self, engine: Any, model_metadata: Metadata | None) -> None:
        self._model_metadata = model_metadata
        self._updater = EngineUpdater(engines_of(engine))
        for collector in self._collectors:
            self._updater.register_collector(collector)


class _Scheme:
    """The part of a scheme that makes its ends."""

    sender: type
    receiver: type

    def create_sender(self) -> Any:
        """Return a sender for the process that trains."""
        return self.sender(self)

    def create_receiver(self, vllm_engine: Any) -> Any:
        """Return the engine's end."""
        return self.receiver(self, vllm_engine)


class VLLMWeightSender(_VerifiedSender, llm.VLLMWeightSender):  # type: ignore[misc]
    """A sender of a model's weights to an engine."""

    def init_all_workers_group(self, model_metadata: Metadata | None = None, vllm_engine: Any = None) -> None:
        """Set the engine (or wrapper, worker, AsyncVLLM) that gets the weights, which must fit the metadata if given.

        Raises ConfigError if there is no engine, or it cannot receive weights in this process.
        """
        self._connect(vllm_engine, model_metadata)


class VLLMWeightReceiver(llm.VLLMWeightReceiver):  # type: ignore[misc]
    """The engine's end of a scheme. Senders need no help from it; `apply_weights` loads weights without a sender."""

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Do nothing: a sender connects to the engine itself."""

    def apply_weights(self, weights: Source, inplace: bool = True) -> None:
        """Load weights into the engine. Raises WeightSyncError if they do not arrive intact."""
        EngineUpdater(engines_of(self._vllm_engine)).push_weights(weights)


class VLLMWeightSyncScheme(_Scheme, llm.VLLMWeightSyncScheme):  # type: ignore[misc]
    """A scheme that sends a model's weights to an engine of this project."""

    sender, receiver = VLLMWeightSender, VLLMWeightReceiver


class SGLangWeightSender(_VerifiedSender, llm.SGLangWeightSender):  # type: ignore[misc]
    """A sender of a model's weights to an SGLang server."""

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Connect to the scheme's server. Raises ConnectionError if it does not answer."""
        self._server = AsyncSGLang.connect(self._scheme.server_url)
        self._connect(self._server, model_metadata)

    def shutdown(self) -> None:
        super().shutdown()
        if self._server is not None:
            self._server.close()

    _server: AsyncSGLang | None = None


class SGLangWeightSyncScheme(llm.SGLangWeightSyncScheme):  # type: ignore[misc]
    """A scheme that sends a model's weights to an SGLang server."""

    def create_sender(self) -> SGLangWeightSender:
        """Return a sender for the process that trains."""
        return SGLangWeightSender(self)


class VLLMDoubleBufferTransport(llm.VLLMDoubleBufferTransport):  # type: ignore[misc]
    """Weights in a folder. A reader sees the previous weights or the new ones, never a part of them."""

    def send_weights(self, model_id: str, weights: Mapping[str, Tensor]) -> None:
        """Write tensors by name; they replace the previous ones at once."""
        file = Path(self.remote_addr) / _FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(tensors, file.with_suffix(".tmp"), metadata={"update": uuid.uuid4().hex})
        file.with_suffix(".tmp").replace(file)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> TensorDict | None:
        """Return the tensors if they have not been returned before, else None."""
        file = Path(self.local_addr) / _FILE
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as reader:
            update = reader.metadata()["update"]
            if update == self._received:
                return None
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - it is not a mapping
        self._received = update
        return TensorDict(tensors)

    _received: str | None = None


_FILE = "weights.safetensors"


class VLLMDoubleBufferWeightSender(llm.VLLMDoubleBufferWeightSender):  # type: ignore[misc]
    """A sender that writes a model's weights to the scheme's folder."""

    def update_weights(self, weights: Source | None = None) -> None:
        """Write weights, by default those of the registered model. Raises RuntimeError before `register_model`."""
        if self._transport is None:
            raise RuntimeError("Transport not initialized. Call register_model first.")
        source = self._model_ref() if weights is None else weights
        self._transport.send_weights("vllm_model", weights_of(source))


class VLLMDoubleBufferWeightReceiver(llm.VLLMDoubleBufferWeightReceiver):  # type: ignore[misc]
    """A receiver that loads new weights from the scheme's folder into an engine."""

    def apply_weights(self, weights: Mapping[str, Tensor], inplace: bool = True) -> None:
        """Load weights into the engine. Raises WeightSyncError if they do not arrive intact."""
        if engines := find_engines(self._vllm_engine):
            EngineUpdater(engines).push_weights(weights)
        else:  # an engine of TorchRL or vLLM itself
            super().apply_weights(weights, inplace)

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Load the folder's weights if they are new; return True if they were."""
        if (weights := self._transport.receive_weights()) is None:
            return False
        self.apply_weights(weights)
        return True


class VLLMDoubleBufferSyncScheme(_Scheme, llm.VLLMDoubleBufferSyncScheme):  # type: ignore[misc]
    """A scheme that passes weights through a folder which the trainer and the engine share."""

    sender, receiver = VLLMDoubleBufferWeightSender, VLLMDoubleBufferWeightReceiver

    def create_transport(self, **_: Any) -> VLLMDoubleBufferTransport:
        """Return the transport of one end."""
        return VLLMDoubleBufferTransport(self.remote_addr, self.local_addr, self.num_threads)
