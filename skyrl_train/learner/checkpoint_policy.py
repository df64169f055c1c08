"""The policy of a checkpoint in one process, and checks that an export of it is that policy.

The policy is read parameter by parameter from the files that its ranks wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.data.chat import render_prompt
from skyrl_train.errors import CheckpointError, DataError
from skyrl_train.learner.base_model_record import (
    BaseModelRecord,
    LoraRecord,
    check_same_base_model,
    tensor_fingerprints,
)
from skyrl_train.models.composite import get_auto_class, get_checkpoint_config, get_composite, get_multimodal_token_ids
from skyrl_train.models.loading import POLICY_PATH_KEY, get_max_positions, open_causal_lm
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters, get_adapter_state_dict, load_peft_adapter
from skyrl_train.models.pretrained_weights import ALL_ROWS, PretrainedWeights
from skyrl_train.models.sharded_tensor import ShardedTensor, replicated
from skyrl_train.models.temporary_weights import temporarily_materialized
from skyrl_train.storage.download_cache import local_copy
from skyrl_train.strategies.checkpoint_shards import CheckpointReader, ParameterSlice, open_shards

POLICY_ROLE = "policy"
"""The folder of a checkpoint that has it."""


class CheckpointPolicy:
    """A policy in float32 on the CPU, of which at most a layer is in memory at a time.

    Frozen parameters are those of the model that the run started from, rounded as the run has rounded them.
    """

    def __init__(
        self, model: PreTrainedModel, pretrained: PretrainedWeights, reader: CheckpointReader, trainer: TrainerConfig
    ):
        """`model`: on the meta device, `saved`: what its parameters were at the start, `reader`: the checkpoint.

        Raises CheckpointError if the checkpoint is of another model, ConfigError as TokenScorer and Adapters do.
        """
        lora = trainer.policy.model.lora
        self.config = get_checkpoint_config(model)
        """The configuration of the checkpoint: of the whole composite, if the policy is a part of one."""
        self.composite = get_composite(model)
        self.adapters = LoraAdapters(model, lora, "trainer.policy.model.lora") if lora.rank else None
        self.frozen_dtype = torch.bfloat16 if trainer.bf16 and self.adapters else torch.float32
        """Of what is not trained, while the run computes with it."""
        self.model = LogprobModel(model, pretrained=pretrained)
        self._start = pretrained
        self.base_is_verified = False
        """True if the frozen parameters are known to be those of the run."""
        self._fill(reader, pretrained)

    @torch.no_grad()
    def _fill(self, reader: CheckpointReader, pretrained: PretrainedWeights) -> None:
        """Read adapters; the rest is read when it is asked for."""
        trained = {}
        for name, parameter in self.model.named_parameters():
            if self.adapters is not None and parameter.requires_grad:
                parameter.data = parameter.data.float()
            if parameter.requires_grad:
                trained[self.model.hf_name(name)] = parameter
        slices = {name: ParameterSlice.from_tensor(parameter) for name, parameter in trained.items()}
        reader.check_parameters(slices)
        for name, parameter in trained.items():
            if not parameter.is_meta:
                parameter.copy_(reader.read_elements(f"param/{name}", slices[name]).view_as(parameter))
        self.model.pretrained = _CheckpointWeights(reader, slices, pretrained, self.frozen_dtype)  # type: ignore[assignment]

    def parameters(self, trained_only: bool = False) -> Iterator[tuple[str, ShardedTensor]]:
        """(Hugging Face name, tensor) of every parameter, adapters apart from what they change."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or not trained_only:
                held = self.model.read_pretrained(name) if parameter.is_meta else parameter.detach()
                yield self.model.hf_name(name), replicated(held, 0)

    def merged(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of the whole model in `dtype`, one at a time; buffers in that of their file."""
        parameters = self.parameters()
        for name, tensor in parameters if self.adapters is None else self.adapters.iter_merged(parameters):
            yield name, tensor.full_tensor().to(dtype)
        for name, buffer in self.model.persistent_buffers():
            yield name, buffer.to(self._start.read(name).dtype)

    def adapter(self) -> dict[str, Tensor]:
        """A and B of every adapted layer in float32, by peft's names. Only of a policy that has adapters."""
        assert self.adapters is not None
        separate = self.adapters.iter_unmerged(self.parameters(trained_only=True))
        return {self.adapters.exported_name(name): tensor.full_tensor() for name, tensor in separate}

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor) -> Tensor:
        """[B, L - 1] in nats, of the tokens [B, L] given those before them, computed as in training but in float32."""
        count, length = token_ids.shape
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        mask[:, 0] = False
        with temporarily_materialized(self.model):
            scores = self.model(
                input_ids=token_ids.reshape(-1),
                position_ids=torch.arange(length).repeat(count),
                offsets=torch.arange(count + 1) * length,
                temperature=torch.ones(count),
                target_mask=mask.reshape(-1),
            )
        logprobs: Tensor = scores.logprobs.view(count, length)[:, 1:]
        return logprobs


class _CheckpointWeights:
    """The parameters that a checkpoint has, and those of the start where it has none: read as SavedWeights are."""

    def __init__(
        self, reader: CheckpointReader, slices: dict[str, ParameterSlice], start: PretrainedWeights, frozen: torch.dtype
    ):
        self._reader = reader
        self._slices = slices
        self._start = start
        self._frozen = frozen

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """Rows of a parameter in float32, by its name in the model."""
        piece = self._slices.get(name)
        if piece is None:
            return self._start.read(name, rows).to(self._frozen).float()
        return self._reader.read_elements(f"param/{name}", piece).view(piece.shape)[rows]


@contextmanager
def open_policy(
    checkpoint: Path, trainer: TrainerConfig, base: str | None = None, recorded: BaseModelRecord | None = None
) -> Iterator[CheckpointPolicy]:
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
    with open_shards(checkpoint / POLICY_ROLE) as reader:
        model, saved = open_causal_lm(
            base or trainer.policy.model.path,
            dtype=torch.float32,
            model_config_kwargs=trainer.policy.model_config_kwargs,
            rope_scaling=trainer.rope_scaling,
            rope_theta=trainer.rope_theta,
            key="--base" if base else POLICY_PATH_KEY,
        )
        lora = trainer.policy.model.lora
        compared = recorded if lora.rank or get_composite(model) is not None else None
        shares = [] if compared is None else [tensor_fingerprints(model, saved, 0, 1)]
        policy = CheckpointPolicy(model, saved, reader, trainer)
        if compared is not None:
            now = BaseModelRecord.of(shares, None if policy.adapters is None else LoraRecord.of(lora, policy.adapters))
            check_same_base_model(checkpoint, compared, now, "trainer.policy.model")
            policy.base_is_verified = True
        yield policy


# -- checks of an export -----------------------------------------------------------------------------------------------


MAX_MEAN_LOGPROB_DIFF = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""The mean difference of log-probs, by the dtype of the export: weights are rounded to it, sums never are."""
_SEQUENCES, _TOKENS = 4, 128
_PROMPT = "What is 2 + 2?"


@dataclass(frozen=True)
class ExportVerification:
    """How far an export and its checkpoint agree."""

    num_tensors: int
    """That were compared bit by bit, and are equal."""
    num_tokens: int
    """Whose log-probs were compared."""
    mean_logprob_diff: float
    """Mean absolute difference of their log-probs."""
    max_logprob_diff: float
    base_is_unrecorded: bool = False
    """True for merged adapters of a checkpoint that does not record its base model, as of an earlier version."""


def verify_model(policy: CheckpointPolicy, folder: Path, dtype: torch.dtype) -> ExportVerification:
    """Compare a folder in `dtype` with a policy, as a model that plain transformers loads.

    Raises CheckpointError if a weight is not the checkpoint's rounded to `dtype`, or if log-probs differ by more than
    ALLOWED_NATS.
    """
    model: Any = get_auto_class(policy.config).from_pretrained(folder, dtype=torch.float32)
    loaded, composite = model.state_dict(), policy.composite
    names = {} if composite is None else composite.tensor_names
    expected = ((names.get(name, name), tensor) for name, tensor in policy.merged(dtype))
    agreement = _verify_logprobs(policy, folder, model, _count_equal_tensors(folder, loaded, expected), dtype)
    return replace(agreement, base_is_unrecorded=policy.adapters is not None and not policy.base_is_verified)


def verify_adapter(policy: CheckpointPolicy, folder: Path, base: str) -> ExportVerification:
    """Compare a folder with a policy, as an adapter that plain peft loads on the model at `base`.

    Raises CheckpointError as `check_model` does. The base has the values that the run has rounded it to.
    """
    start: Any = get_auto_class(policy.config).from_pretrained(local_copy(base), dtype=policy.frozen_dtype)
    model = load_peft_adapter(start.float(), folder)
    compared = _count_equal_tensors(folder, get_adapter_state_dict(model), policy.adapter().items())
    return _verify_logprobs(policy, folder, model, compared, torch.float32)


def verify_prompt_ids(tokenizer: Any, folder: Path, chat_template_kwargs: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the tokenizer in `folder` writes a prompt with the ids of the training.

    Args:
        tokenizer: The tokenizer of the training, with its chat template.
        folder: The export, whose tokenizer is loaded by plain transformers.
        chat_template_kwargs: Variables of the chat template. A template among them is ignored: exports have their own.
    """
    variables = {name: value for name, value in chat_template_kwargs.items() if name != "chat_template"}
    expected = _prompt_ids(tokenizer, variables)
    if (got := _prompt_ids(AutoTokenizer.from_pretrained(folder), variables)) != expected:
        raise CheckpointError(
            f"{folder}: once its tokenizer is loaded, a prompt has the ids {got}, but in training it had {expected}. "
            "The export is not kept."
        )


def _prompt_ids(tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> list[int]:
    """Return the ids of a prompt; those of its text alone if there is no chat template, or if it rejects the prompt."""
    with suppress(DataError):
        if tokenizer.chat_template:
            return render_prompt(tokenizer, [{"role": "user", "content": _PROMPT}], chat_template_kwargs)
    return list(tokenizer(_PROMPT)["input_ids"])


def _count_equal_tensors(folder: Path, loaded: dict[str, Tensor], expected: Iterable[tuple[str, Tensor]]) -> int:
    """The number of tensors, all of which are equal."""
    names = []
    for name, tensor in expected:
        got = loaded.get(name)
        if got is None or got.shape != tensor.shape or not torch.equal(got, tensor.to(got.dtype)):
            wrong = "absent" if got is None else "not what it is in the checkpoint"
            raise CheckpointError(f"{folder}: {name} is {wrong} once the folder is loaded. The export is not kept.")
        names.append(name)
    return len(names)


@torch.no_grad()
def _verify_logprobs(
    policy: CheckpointPolicy, folder: Path, model: Any, num_tensors: int, dtype: torch.dtype
) -> ExportVerification:
    longest = min(_TOKENS, get_max_positions(model) or _TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(policy.config.get_text_config().vocab_size, (_SEQUENCES, longest), generator=generator)
    if policy.composite is not None:
        ids[torch.isin(ids, get_multimodal_token_ids(policy.config))] = 0
    rows = [model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1) for row in ids]
    got = torch.stack([row.gather(-1, one[1:, None])[:, 0] for row, one in zip(rows, ids, strict=True)])
    difference = (got - policy.logprobs(ids)).abs()
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= MAX_MEAN_LOGPROB_DIFF[dtype]:
        raise CheckpointError(
            f"{folder}: once it is loaded, log-probs of {difference.numel()} tokens differ from the checkpoint's by "
            f"{mean:.3g} nats in the mean and up to {largest:.3g}; {MAX_MEAN_LOGPROB_DIFF[dtype]:g} is allowed. The weights are "
            "the same, so its configuration is another one, as when an adapter is loaded on a model that the run has "
            "changed (trainer.policy.model_config_kwargs, trainer.rope_scaling): export such a run without --adapter."
        )
    return ExportVerification(num_tensors, difference.numel(), mean, largest)
