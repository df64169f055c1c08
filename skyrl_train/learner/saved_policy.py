"""The policy of a checkpoint in one process, read parameter by parameter from the files that its ranks wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.learner.base_model import BaseModel, LoraRecord, refuse_other_base, tensor_fingerprints
from skyrl_train.models.composite import checkpoint_config, composite_of
from skyrl_train.models.lent_weights import weights_lent
from skyrl_train.models.loading import POLICY_PATH, open_causal_lm
from skyrl_train.models.lora import Adapters
from skyrl_train.models.saved_weights import EVERYTHING, SavedWeights
from skyrl_train.models.sharded_tensor import ShardedTensor, replicated
from skyrl_train.models.token_scorer import TokenScorer
from skyrl_train.strategies.shards import ShardReader, Slice, open_shards

ROLE = "policy"
"""The folder of a checkpoint that has it."""


class SavedPolicy:
    """A policy in float32 on the CPU, of which at most a layer is in memory at a time.

    Frozen parameters are those of the model that the run started from, rounded as the run has rounded them.
    """

    def __init__(self, model: PreTrainedModel, saved: SavedWeights, reader: ShardReader, trainer: TrainerConfig):
        """`model`: on the meta device, `saved`: what its parameters were at the start, `reader`: the checkpoint.

        Raises CheckpointError if the checkpoint is of another model, ConfigError as TokenScorer and Adapters do.
        """
        lora = trainer.policy.model.lora
        self.config = checkpoint_config(model)
        """The configuration of the checkpoint: of the whole composite, if the policy is a part of one."""
        self.composite = composite_of(model)
        self.adapters = Adapters(model, lora, "trainer.policy.model.lora") if lora.rank else None
        self.frozen_dtype = torch.bfloat16 if trainer.bf16 and self.adapters else torch.float32
        """Of what is not trained, while the run computes with it."""
        self.scorer = TokenScorer(model, saved=saved)
        self._start = saved
        self.base_is_compared = False
        """True if the frozen parameters are known to be those of the run."""
        self._fill(reader, saved)

    @torch.no_grad()
    def _fill(self, reader: ShardReader, saved: SavedWeights) -> None:
        """Read adapters; the rest is read when it is asked for."""
        trained = {}
        for name, parameter in self.scorer.named_parameters():
            if self.adapters is not None and parameter.requires_grad:
                parameter.data = parameter.data.float()
            if parameter.requires_grad:
                trained[self.scorer.hf_name(name)] = parameter
        slices = {name: Slice.of(parameter) for name, parameter in trained.items()}
        reader.check(slices)
        for name, parameter in trained.items():
            if not parameter.is_meta:
                parameter.copy_(reader.elements(f"param/{name}", slices[name]).view_as(parameter))
        self.scorer.saved = _Weights(reader, slices, saved, self.frozen_dtype)  # type: ignore[assignment]

    def parameters(self, trained_only: bool = False) -> Iterator[tuple[str, ShardedTensor]]:
        """(Hugging Face name, tensor) of every parameter, adapters apart from what they change."""
        for name, parameter in self.scorer.named_parameters():
            if parameter.requires_grad or not trained_only:
                held = self.scorer.read(name) if parameter.is_meta else parameter.detach()
                yield self.scorer.hf_name(name), replicated(held, 0)

    def merged(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of the whole model in `dtype`, one at a time; buffers in that of their file."""
        parameters = self.parameters()
        for name, tensor in parameters if self.adapters is None else self.adapters.merged(parameters):
            yield name, tensor.whole().to(dtype)
        for name, buffer in self.scorer.saved_buffers():
            yield name, buffer.to(self._start.read(name).dtype)

    def adapter(self) -> dict[str, Tensor]:
        """A and B of every adapted layer in float32, by peft's names. Only of a policy that has adapters."""
        assert self.adapters is not None
        separate = self.adapters.separate(self.parameters(trained_only=True))
        return {self.adapters.exported_name(name): tensor.whole() for name, tensor in separate}

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor) -> Tensor:
        """[B, L - 1] in nats, of the tokens [B, L] given those before them, computed as in training but in float32."""
        count, length = token_ids.shape
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        mask[:, 0] = False
        with weights_lent(self.scorer):
            scores = self.scorer(
                input_ids=token_ids.reshape(-1),
                position_ids=torch.arange(length).repeat(count),
                offsets=torch.arange(count + 1) * length,
                temperature=torch.ones(count),
                score_mask=mask.reshape(-1),
            )
        logprobs: Tensor = scores.logprobs.view(count, length)[:, 1:]
        return logprobs


class _Weights:
    """The parameters that a checkpoint has, and those of the start where it has none: read as SavedWeights are."""

    def __init__(self, reader: ShardReader, slices: dict[str, Slice], start: SavedWeights, frozen: torch.dtype):
        self._reader = reader
        self._slices = slices
        self._start = start
        self._frozen = frozen

    def read(self, name: str, rows: slice = EVERYTHING) -> Tensor:
        """Rows of a parameter in float32, by its name in the model."""
        piece = self._slices.get(name)
        if piece is None:
            return self._start.read(name, rows).to(self._frozen).float()
        return self._reader.elements(f"param/{name}", piece).view(piece.shape)[rows]


@contextmanager
def open_policy(
    checkpoint: Path, trainer: TrainerConfig, base: str | None = None, recorded: BaseModel | None = None
) -> Iterator[SavedPolicy]:
    """Open the policy of a checkpoint, whatever strategy and number of ranks wrote it; its files are closed on exit.

    Args:
        checkpoint: The folder of the checkpoint.
        trainer: The configuration of the run.
        base: Where the model of trainer.policy.model.path is now: a folder, an address or a hub name.
        recorded: The checkpoint's record of that model, which is compared if an export takes weights from it: those
            below adapters, and the other towers of a composite.

    Raises:
        ConfigError: The model cannot be loaded.
        CheckpointError: Files are missing or of another model, or the base model is not the recorded one.
    """
    with open_shards(checkpoint / ROLE) as reader:
        model, saved = open_causal_lm(
            base or trainer.policy.model.path,
            dtype=torch.float32,
            model_config_kwargs=trainer.policy.model_config_kwargs,
            rope_scaling=trainer.rope_scaling,
            rope_theta=trainer.rope_theta,
            key="--base" if base else POLICY_PATH,
        )
        lora = trainer.policy.model.lora
        compared = recorded if lora.rank or composite_of(model) is not None else None
        shares = [] if compared is None else [tensor_fingerprints(model, saved, 0, 1)]
        policy = SavedPolicy(model, saved, reader, trainer)
        if compared is not None:
            now = BaseModel.of(shares, None if policy.adapters is None else LoraRecord.of(lora, policy.adapters))
            refuse_other_base(checkpoint, compared, now, "trainer.policy.model")
            policy.base_is_compared = True
        yield policy
