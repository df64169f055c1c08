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
from skyrl_train.learner.base_model import BaseModel, LoraRecord, refuse_other_base, tensor_fingerprints
from skyrl_train.models.composite import auto_class, checkpoint_config, composite_of, placeholders
from skyrl_train.models.lent_weights import weights_lent
from skyrl_train.models.loading import POLICY_PATH, max_positions, open_causal_lm
from skyrl_train.models.lora import Adapters, adapter_of, with_adapter
from skyrl_train.models.saved_weights import EVERYTHING, SavedWeights
from skyrl_train.models.sharded_tensor import ShardedTensor, replicated
from skyrl_train.models.token_scorer import TokenScorer
from skyrl_train.storage.copies import local_copy
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


# -- checks of an export -----------------------------------------------------------------------------------------------


ALLOWED_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""The mean difference of log-probs, by the dtype of the export: weights are rounded to it, sums never are."""
_SEQUENCES, _TOKENS = 4, 128
_PROMPT = "What is 2 + 2?"


@dataclass(frozen=True)
class Agreement:
    """How far an export and its checkpoint agree."""

    num_tensors: int
    """That were compared bit by bit, and are equal."""
    num_tokens: int
    """Whose log-probs were compared."""
    mean_nats: float
    """Mean absolute difference of their log-probs."""
    largest_nats: float
    from_base: bool = False
    """True for merged adapters of a checkpoint that does not record its base model, as of an earlier version."""


def check_model(policy: SavedPolicy, folder: Path, dtype: torch.dtype) -> Agreement:
    """Compare a folder in `dtype` with a policy, as a model that plain transformers loads.

    Raises CheckpointError if a weight is not the checkpoint's rounded to `dtype`, or if log-probs differ by more than
    ALLOWED_NATS.
    """
    model: Any = auto_class(policy.config).from_pretrained(folder, dtype=torch.float32)
    loaded, composite = model.state_dict(), policy.composite
    names = {} if composite is None else composite.names
    expected = ((names.get(name, name), tensor) for name, tensor in policy.merged(dtype))
    agreement = _agreement(policy, folder, model, _compared(folder, loaded, expected), dtype)
    return replace(agreement, from_base=policy.adapters is not None and not policy.base_is_compared)


def check_adapter(policy: SavedPolicy, folder: Path, base: str) -> Agreement:
    """Compare a folder with a policy, as an adapter that plain peft loads on the model at `base`.

    Raises CheckpointError as `check_model` does. The base has the values that the run has rounded it to.
    """
    start: Any = auto_class(policy.config).from_pretrained(local_copy(base), dtype=policy.frozen_dtype)
    model = with_adapter(start.float(), folder)
    compared = _compared(folder, adapter_of(model), policy.adapter().items())
    return _agreement(policy, folder, model, compared, torch.float32)


def check_prompt(tokenizer: Any, folder: Path, chat_template_kwargs: Mapping[str, Any]) -> None:
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


def _compared(folder: Path, loaded: dict[str, Tensor], expected: Iterable[tuple[str, Tensor]]) -> int:
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
def _agreement(policy: SavedPolicy, folder: Path, model: Any, num_tensors: int, dtype: torch.dtype) -> Agreement:
    longest = min(_TOKENS, max_positions(model) or _TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(policy.config.get_text_config().vocab_size, (_SEQUENCES, longest), generator=generator)
    if policy.composite is not None:
        ids[torch.isin(ids, placeholders(policy.config))] = 0
    rows = [model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1) for row in ids]
    got = torch.stack([row.gather(-1, one[1:, None])[:, 0] for row, one in zip(rows, ids, strict=True)])
    difference = (got - policy.logprobs(ids)).abs()
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= ALLOWED_NATS[dtype]:
        raise CheckpointError(
            f"{folder}: once it is loaded, log-probs of {difference.numel()} tokens differ from the checkpoint's by "
            f"{mean:.3g} nats in the mean and up to {largest:.3g}; {ALLOWED_NATS[dtype]:g} is allowed. The weights are "
            "the same, so its configuration is another one, as when an adapter is loaded on a model that the run has "
            "changed (trainer.policy.model_config_kwargs, trainer.rope_scaling): export such a run without --adapter."
        )
    return Agreement(num_tensors, difference.numel(), mean, largest)
