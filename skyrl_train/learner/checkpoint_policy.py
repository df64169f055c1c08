"""The policy of a checkpoint, loaded in one process, and checks that an export of it equals that policy.

Parameters are read one at a time from the files that the ranks wrote.
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
from skyrl_train.data.batch import SFTExample, collate_sft_examples
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
"""Name of the checkpoint's folder with the policy."""


class CheckpointPolicy:
    """The policy of a checkpoint in float32 on the CPU, with at most one layer in memory at a time.

    Frozen parameters come from the model that the run started from, rounded to the dtype that the run used for them.
    """

    def __init__(
        self, model: PreTrainedModel, pretrained: PretrainedWeights, reader: CheckpointReader, trainer: TrainerConfig
    ):
        """Load the adapters of a checkpoint; other parameters are read when they are used.

        Args:
            model: The model on the meta device.
            pretrained: The parameters of the model that the run started from.
            reader: The files of the checkpoint.
            trainer: The section trainer of the run's configuration.

        Raises:
            CheckpointError: The checkpoint belongs to another model.
            ConfigError: The model or trainer.policy.model.lora is not supported.
        """
        lora = trainer.policy.model.lora
        self.config = get_checkpoint_config(model)
        """The configuration for the exported folder: that of the whole composite, if the policy is a part of one."""
        self.composite = get_composite(model)
        self.adapters = LoraAdapters(model, lora, "trainer.policy.model.lora") if lora.rank else None
        self.frozen_dtype = torch.bfloat16 if trainer.bf16 and self.adapters else torch.float32
        """The dtype in which the run computes with frozen parameters."""
        self.model = LogprobModel(model, pretrained=pretrained)
        self._start = pretrained
        self.base_is_verified = False
        """True if the frozen parameters were compared with the record of the run."""
        self._fill(reader, pretrained)

    @torch.no_grad()
    def _fill(self, reader: CheckpointReader, pretrained: PretrainedWeights) -> None:
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
        """Yield (Hugging Face name, tensor) for every parameter, reading one at a time. Adapters are not merged.

        Args:
            trained_only: True to yield only parameters that the run trains.
        """
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or not trained_only:
                values = self.model.read_pretrained(name) if parameter.is_meta else parameter.detach()
                yield self.model.hf_name(name), replicated(values, 0)

    def merged(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) for the full model with merged adapters, reading one tensor at a time.

        Args:
            dtype: The dtype of the yielded parameters. Buffers keep the dtype of their file.
        """
        parameters = self.parameters()
        for name, tensor in parameters if self.adapters is None else self.adapters.iter_merged(parameters):
            yield name, tensor.full_tensor().to(dtype)
        for name, buffer in self.model.persistent_buffers():
            yield name, buffer.to(self._start.read(name).dtype)

    def adapter(self) -> dict[str, Tensor]:
        """Return the matrices A and B of every adapted layer in float32, by peft's names.

        The policy must have adapters.
        """
        assert self.adapters is not None
        matrices = self.adapters.iter_unmerged(self.parameters(trained_only=True))
        return dict(self.adapters.to_peft(name, tensor.full_tensor()) for name, tensor in matrices)

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Compute log-probs of tokens with the forward pass of the training, but in float32.

        Args:
            token_ids: Sequences of equal length, [B, L].

        Returns:
            The log-prob in nats of each token given the tokens before it, [B, L - 1].
        """
        count, length = token_ids.shape
        mask = [False, *[True] * (length - 1)]
        batch = collate_sft_examples([SFTExample(ids, mask) for ids in token_ids.tolist()])
        with temporarily_materialized(self.model):
            scores = self.model(self.model.lay_out(batch))
        logprobs: Tensor = scores.logprobs.view(count, length)[:, 1:]
        return logprobs


class _CheckpointWeights:
    """Parameters read from a checkpoint, or from the model that the run started from if the checkpoint lacks them.

    It has the `read` method of `PretrainedWeights`.
    """

    def __init__(
        self, reader: CheckpointReader, slices: dict[str, ParameterSlice], start: PretrainedWeights, frozen: torch.dtype
    ):
        self._reader = reader
        self._slices = slices
        self._start = start
        self._frozen = frozen

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """Return rows of a parameter in float32.

        Args:
            name: The Hugging Face name of the parameter.
            rows: The rows to return; all by default.
        """
        parameter_slice = self._slices.get(name)
        if parameter_slice is None:
            return self._start.read(name, rows).to(self._frozen).float()
        return self._reader.read_elements(f"param/{name}", parameter_slice).view(parameter_slice.shape)[rows]


@contextmanager
def open_policy(
    checkpoint: Path, trainer: TrainerConfig, base: str | None = None, recorded: BaseModelRecord | None = None
) -> Iterator[CheckpointPolicy]:
    """Open the policy of a checkpoint, which any strategy on any number of ranks may have written.

    A context manager: its files are closed on exit.

    Args:
        checkpoint: The folder of the checkpoint.
        trainer: The section trainer of the run's configuration.
        base: The current location of the model of trainer.policy.model.path: a folder, a URI or a hub name. None if it
            is still there.
        recorded: The checkpoint's record of that model. It is compared if an export takes weights from the model: those
            below adapters, and the other parts of a composite. None to skip the comparison.

    Raises:
        ConfigError: The model cannot be loaded.
        CheckpointError: Files are missing or belong to another model.
        CheckpointMismatch: The base model is not the recorded one.
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
        expected = recorded if lora.rank or get_composite(model) is not None else None
        shares = [] if expected is None else [tensor_fingerprints(model, saved, 0, 1)]
        policy = CheckpointPolicy(model, saved, reader, trainer)
        if expected is not None:
            lora_record = None if policy.adapters is None else LoraRecord.of(lora, policy.adapters)
            check_same_base_model(
                checkpoint, expected, BaseModelRecord.of(shares, lora_record), "trainer.policy.model"
            )  # fmt: skip
            policy.base_is_verified = True
        yield policy


# -- checks of an export -----------------------------------------------------------------------------------------------


MAX_MEAN_LOGPROB_DIFF = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest allowed mean difference of log-probs (nats), by the dtype to which the export rounds weights."""
_SEQUENCES, _TOKENS = 4, 128
_PROMPT = "What is 2 + 2?"


@dataclass(frozen=True)
class ExportVerification:
    """The result of comparing an export with its checkpoint."""

    num_tensors: int
    """Number of tensors that were compared; all of them are bitwise equal."""
    num_tokens: int
    """Number of tokens whose log-probs were compared."""
    mean_logprob_diff: float
    """Mean absolute difference of the log-probs, in nats."""
    max_logprob_diff: float
    """Largest absolute difference of the log-probs, in nats."""
    base_is_unrecorded: bool = False
    """True for merged adapters if the checkpoint does not record its base model, which earlier versions did not do."""


def verify_model(policy: CheckpointPolicy, folder: Path, dtype: torch.dtype) -> ExportVerification:
    """Compare an exported model, loaded by transformers alone, with the policy of its checkpoint.

    Args:
        policy: The policy of the checkpoint.
        folder: The exported folder.
        dtype: The dtype of the exported weights.

    Raises:
        CheckpointError: A weight is not that of the checkpoint rounded to `dtype`, or the mean difference of log-probs
            exceeds MAX_MEAN_LOGPROB_DIFF.
    """
    model: Any = get_auto_class(policy.config).from_pretrained(folder, dtype=torch.float32)
    loaded, composite = model.state_dict(), policy.composite
    names = {} if composite is None else composite.tensor_names
    expected = ((names.get(name, name), tensor) for name, tensor in policy.merged(dtype))
    agreement = _verify_logprobs(policy, folder, model, _count_equal_tensors(folder, loaded, expected), dtype)
    return replace(agreement, base_is_unrecorded=policy.adapters is not None and not policy.base_is_verified)


def verify_adapter(policy: CheckpointPolicy, folder: Path, base: str) -> ExportVerification:
    """Compare an exported adapter, loaded by peft alone, with the policy of its checkpoint.

    Args:
        policy: The policy of the checkpoint, which has adapters.
        folder: The exported folder of the adapter.
        base: The base model to load the adapter on: a folder, a URI or a hub name. It is rounded as in the run.

    Raises:
        CheckpointError: A weight of the adapter is not that of the checkpoint, or the mean difference of log-probs
            exceeds MAX_MEAN_LOGPROB_DIFF.
    """
    start: Any = get_auto_class(policy.config).from_pretrained(local_copy(base), dtype=policy.frozen_dtype)
    model = load_peft_adapter(start.float(), folder)
    num_tensors = _count_equal_tensors(folder, get_adapter_state_dict(model), policy.adapter().items())
    return _verify_logprobs(policy, folder, model, num_tensors, torch.float32)


def verify_prompt_ids(tokenizer: Any, folder: Path, chat_template_kwargs: Mapping[str, Any]) -> None:
    """Check that the tokenizer of an export renders a prompt with the same ids as the tokenizer of the training.

    Args:
        tokenizer: The tokenizer of the training, with its chat template.
        folder: The export. Its tokenizer is loaded by transformers alone.
        chat_template_kwargs: Variables of the chat template. The key chat_template is ignored, because the export has
            its own template.

    Raises:
        CheckpointError: The ids differ.
    """
    variables = {name: value for name, value in chat_template_kwargs.items() if name != "chat_template"}
    expected = _prompt_ids(tokenizer, variables)
    if (got := _prompt_ids(AutoTokenizer.from_pretrained(folder), variables)) != expected:
        raise CheckpointError(
            f"{folder}: the exported tokenizer encodes a prompt as {got}, but the tokenizer of the training as "
            f"{expected}. The export is deleted. Please report this with the name of the model."
        )


def _prompt_ids(tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> list[int]:
    """Return the ids of a prompt; those of its text alone if there is no chat template or it rejects the prompt."""
    with suppress(DataError):
        if tokenizer.chat_template:
            return render_prompt(tokenizer, [{"role": "user", "content": _PROMPT}], chat_template_kwargs)
    return list(tokenizer(_PROMPT)["input_ids"])


def _count_equal_tensors(folder: Path, loaded: dict[str, Tensor], expected: Iterable[tuple[str, Tensor]]) -> int:
    """Return the number of expected tensors. Raises CheckpointError if one is missing or differs."""
    count = 0
    for name, tensor in expected:
        got = loaded.get(name)
        if got is None or got.shape != tensor.shape or not torch.equal(got, tensor.to(got.dtype)):
            problem = "is missing" if got is None else "differs from the checkpoint"
            raise CheckpointError(
                f"{folder}: {name} {problem} after the export was loaded. The export is deleted. Please report this "
                "with the name of the model."
            )
        count += 1
    return count


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
    got = torch.stack([row.gather(-1, tokens[1:, None])[:, 0] for row, tokens in zip(rows, ids, strict=True)])
    difference = (got - policy.logprobs(ids)).abs()
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= MAX_MEAN_LOGPROB_DIFF[dtype]:
        raise CheckpointError(
            f"{folder}: log-probs of {difference.numel()} tokens differ from the checkpoint's by {mean:.3g} nats on "
            f"average and by up to {largest:.3g}; an average of {MAX_MEAN_LOGPROB_DIFF[dtype]:g} is allowed. The "
            "weights are equal, so the configuration of the loaded model differs. That happens if an adapter is loaded "
            "on a model that the run has changed (trainer.policy.model_config_kwargs, trainer.rope_scaling). Export "
            "such a run without --adapter."
        )
    return ExportVerification(num_tensors, difference.numel(), mean, largest)
