"""The body of a causal language model over the ragged batch: the base of LogprobModel and ValueModel, which add a head.

Legend: T tokens of all sequences, B sequences, c tokens that this rank runs, N target tokens, L layers with experts, k
experts for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.lora import BASE_LAYER_INFIX
from skyrl_train.models.model_inputs import ModelInputs, lay_out
from skyrl_train.models.padding_free import check_padding_free, get_rope_parameters, patch_model
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.parameter_shards import ParameterShard
from skyrl_train.models.pretrained_weights import ALL_ROWS, PretrainedWeights
from skyrl_train.models.ragged_attention import RAGGED_ATTENTION_NAME, Segments, deterministic_index_select
from skyrl_train.models.recurrent_layers import check_without_parallelism, get_recurrent_mixers, pack_mixers
from skyrl_train.models.routing import Routers
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.shared_prompts import SharedPromptLayout
from skyrl_train.models.sliding_windows import max_plain_attention_length, packed_forward, shortened_windows
from skyrl_train.models.temporary_weights import temporarily_materialized
from skyrl_train.models.tensor_parallel import TensorParallel

_CHECK_LENGTH = 9
"""Length of the sequences in the check of a new model, in tokens."""
_CHECK_RECURRENT_LENGTH = 80
"""The same for a model with recurrent layers: more than one chunk of a scan."""
_CHUNK = 64
"""Number of tokens that a scan computes at once."""
_CHECK_WINDOW = 4
"""Sliding window in the check of a new model, in tokens: less than the length of the check's sequences."""


class RaggedModel(nn.Module):
    """The base of models that compute hidden states of all tokens; the head reads those before the target tokens.

    The model is switched to attention without padding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parallel_group: ParallelGroup | None = None,
        pretrained: PretrainedWeights | None = None,
        expert_parallel: ExpertParallel | None = None,
    ):
        """Wrap a model, after checks that the hidden states of a sequence depend on nothing but the sequence.

        Args:
            model: A causal language model or its body, with parameters on a device or on the meta device.
            parallel_group: The ranks that share every batch. Each passes the full batch and gets the full result.
            pretrained: The weights from which the parameters of a meta-device model are read.
            expert_parallel: The ranks that hold different experts. They run the same number of batches.

        Raises:
            ConfigError: Hidden states would depend on other sequences in the batch, or on randomness.
        """
        super().__init__()
        patch_model(model)
        check_padding_free(model)
        if parallel_group is not None:
            check_without_parallelism(model, parallel_group.size_key)
        model.set_attn_implementation(RAGGED_ATTENTION_NAME)
        pack_mixers(model)
        self.model = model
        self.pretrained = pretrained
        self.parallel_group = parallel_group
        self.sequence_parallel = parallel_group if isinstance(parallel_group, SequenceParallel) else None
        self.tensor_parallel = parallel_group if isinstance(parallel_group, TensorParallel) else None
        self.expert_parallel = expert_parallel
        self.routers = Routers(model)
        self.router_aux_loss_weight = 0.0
        """Weight of the router auxiliary loss for each target token; 0 for none."""
        self.routed_experts: Tensor | None = None
        """The experts of the last forward [T, L, k] int16, if `routers.record_routed_experts` is set."""
        self.parameter_shards: dict[str, ParameterShard] = {}
        """Checkpoint name -> shard, for parameters of which this rank holds only a part."""
        self._max_exact_length = max_exact_length(model.config.get_text_config())
        self._learned_positions = _learned_positions(model)
        self._has_recurrent_layers = bool(get_recurrent_mixers(model))
        self._noisy = [module for module in model.modules() if any("jitter" in name for name in vars(module))]

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, as `Module.train` does.

        Routers with jitter stay in evaluation mode, because engines compute log-probs without its noise.
        """
        super().train(mode)
        for module in self._noisy:
            module.training = False
        return self

    def hf_name(self, name: str) -> str:
        """Return a parameter's name in the Hugging Face checkpoint, from its name in this module."""
        return name.removeprefix("model.")

    def read_pretrained(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """Return rows of this rank's shard of a parameter from the pretrained weights, in their dtype.

        Only for a model with `pretrained` weights.

        Args:
            name: The parameter's name in this module.
            rows: Rows of the shard; by default all.
        """
        assert self.pretrained is not None, f"{name} has no values: its model has no pretrained weights"
        name = self.hf_name(name)
        shard, checkpoint_name = self.parameter_shards.get(name), name.replace(BASE_LAYER_INFIX, ".")
        if shard is None:
            return self.pretrained.read(checkpoint_name, rows)
        if shard.dim == 0 and shard.blocks == 1:
            return self.pretrained.read(
                checkpoint_name, shard.to_full_rows(self.pretrained.count_rows(checkpoint_name), rows)
            )
        return shard.extract(self.pretrained.read(checkpoint_name))[rows]

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, buffer) of the buffers in checkpoints, such as the router biases of DeepSeek."""
        for path, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}", buffer

    def expert_modules(self) -> list[nn.Module]:
        """Return the modules that hold the experts of a layer; empty without expert parallelism."""
        if self.expert_parallel is None:
            return []
        owners = {name.rpartition(".")[0] for name in self.parameter_shards}
        return [module for path, module in self.model.named_modules() if self.hf_name(f"model.{path}") in owners]

    def decoder_layers(self) -> list[nn.Module]:
        """Return the repeated blocks, which strategies shard separately."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if any(c.__name__ in names for c in type(module).__mro__)]

    def lay_out(
        self, batch: TrainBatch, shared_prompt_lengths: Tensor | None = None, replayed_experts: Tensor | None = None
    ) -> ModelInputs:
        """Return the inputs of `forward` for a micro-batch; all of its tensors are on the CPU.

        Args:
            batch: The micro-batch, on the CPU. The target tokens are those in its loss mask, which never has a
                sequence's first token.
            shared_prompt_lengths: Number of leading tokens that each sequence shares with the previous one [B], or
                None. Shared tokens run once, which changes neither values nor gradients.
            replayed_experts: Expert ids to replay [T, L, k], or None; see TrainBatch.routing.

        Raises:
            ConfigError: A sequence is longer than the model supports.
        """
        inputs = lay_out(
            batch,
            shared_prompt_lengths,
            None if replayed_experts is None else self.routers.select_layers(replayed_experts),
            sequence_parallel=self.sequence_parallel,
            tensor_parallel=self.tensor_parallel,
            has_recurrent_layers=self._has_recurrent_layers,
            records_experts=self.routers.record_routed_experts,
            router_aux_loss_weight=self.router_aux_loss_weight,
        )
        longest = max(inputs.segments.attended_lengths)
        if self._max_exact_length and longest > self._max_exact_length:
            raise ConfigError(
                f"A sequence has {longest} tokens, but beyond {self._max_exact_length} this model's rope changes for "
                "the full micro-batch (longrope), or its attention is split into chunks (Llama 4). Shorten prompts or "
                "responses: max_prompt_length, max_generate_length."
            )
        if self._learned_positions and longest > self._learned_positions:
            raise ConfigError(
                f"A sequence has {longest} tokens, but this model has embeddings of {self._learned_positions} "
                "positions. Shorten prompts or responses: max_prompt_length, max_generate_length."
            )
        return inputs

    def hidden_before_targets(self, inputs: ModelInputs) -> Tensor:
        """Run the body and return the hidden states from which the target tokens are predicted [N, hidden size]."""
        self.routers.loss_inputs = inputs.router_loss_inputs
        hidden = self._hidden_states(
            inputs.input_ids, inputs.position_ids, inputs.segments, self.sequence_parallel, inputs.replayed_experts
        )
        self.routed_experts = self._all_routed_experts(inputs) if self.routers.record_routed_experts else None
        return deterministic_index_select(hidden, inputs.targets.state_indices)

    def _all_routed_experts(self, inputs: ModelInputs) -> Tensor:
        """Return the experts of all tokens of the micro-batch, int16 [T, L, k]. Collective in a sequence group."""
        experts = self.routers.routed_experts()
        if self.sequence_parallel is not None:
            local = self.sequence_parallel.local_slice(inputs.num_computed_tokens)
            everywhere = experts.new_zeros(inputs.num_computed_tokens, *experts.shape[1:], dtype=torch.int32)
            everywhere[local] = experts.int()  # NCCL does not support int16
            experts = self.sequence_parallel.all_reduce(everywhere).to(torch.int16)
        assert inputs.inverse_indices is not None, "lay_out was called before record_routed_experts was set"
        return experts[inputs.inverse_indices]

    def scatter_to_tokens(self, values: Tensor, inputs: ModelInputs) -> Tensor:
        """Return all ranks' values [N] at the positions of their targets [T]; 0, with a gradient of 0, elsewhere.

        In a parallel group this is a collective.
        """
        if inputs.targets.is_placeholder:
            values = values * 0.0
        scattered = values.new_zeros(inputs.num_tokens).index_copy(0, inputs.targets.positions, values)
        return scattered if self.parallel_group is None else self.parallel_group.all_reduce_disjoint(scattered)

    def _hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segments: Segments,
        parallel: SequenceParallel | None,
        replayed_experts: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states [c, hidden size] of the c tokens that this rank runs."""
        with self.routers.forward_pass(replayed_experts), packed_forward():
            output = self.model.base_model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(0),
                use_cache=False,
                ragged_segments=segments,
                sequence_parallel=parallel,
            )
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden


def get_lm_head(model: PreTrainedModel) -> nn.Linear:
    """Return the LM head. Raises ConfigError for a model that is not a body with a linear head."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        raise ConfigError(
            f"{type(model).__name__} is not a causal language model with a linear head. Use a text-only model."
        )
    return head


def verify_and_shard(ragged_model: RaggedModel) -> None:
    """Check that a model can run without padding and in its parallel groups, and shard it.

    The check runs the same tokens twice in one batch, after different ones. Both results must be equal, and equal to
    those of the model's own attention. Sliding windows are shortened meanwhile, so that they are shorter than the
    sequences. In tensor and expert parallelism the model is then sharded. The parallel groups, if any, must get the
    same results as one process.

    Raises:
        ConfigError: A result differs, or the model cannot be sharded.
    """
    with temporarily_materialized(ragged_model), shortened_windows(ragged_model.model, _CHECK_WINDOW) as windowed:
        _verify_and_shard(ragged_model, compare_attention=windowed or ragged_model.pretrained is None)


def _verify_and_shard(ragged_model: RaggedModel, compare_attention: bool) -> None:
    """Implement `verify_and_shard`; `compare_attention` reads temporary weights once more."""
    parameter, vocabulary = next(ragged_model.parameters()), ragged_model.model.config.get_text_config().vocab_size
    length = _CHECK_RECURRENT_LENGTH if get_recurrent_mixers(ragged_model.model) else _CHECK_LENGTH
    tokens = torch.arange(1, 1 + length, device=parameter.device) % vocabulary
    ids = torch.cat([tokens, tokens[[3, 4]], tokens])
    position_ids = torch.cat([torch.arange(part, device=parameter.device) for part in (length, 2, length)])
    parallel = ragged_model.sequence_parallel
    layout = SharedPromptLayout.from_offsets(
        torch.tensor([0, length, length + 2, 2 * length + 2], device=parameter.device),
        None,
        1 if parallel is None else parallel.size,
    )
    order = layout.token_indices
    with torch.no_grad():
        computed = ragged_model._hidden_states(ids[order], position_ids[order], layout.segments, None)
    first, second = computed[layout.inverse_indices[:length]], computed[layout.inverse_indices[length + 2 :]]
    if not is_close(first, second, computed.dtype):
        raise ConfigError(
            f"{type(ragged_model.model).__name__} lets sequences of one batch see each other, because something other "
            "than its attention and its known recurrent layers combines tokens. It cannot run without padding: use "
            "another model."
        )
    if compare_attention:
        reference = _own_attention(ragged_model, tokens)
        deviation = (first - reference).float().norm(dim=-1) / reference.float().norm(dim=-1)
        # The median of a chunk, because rounding may send some tokens to other experts.
        medians = [float(chunk.median()) for chunk in deviation.split(_CHUNK)]
        if not max(medians) <= (0.25 if computed.dtype.itemsize < 4 else 1e-3):
            raise ConfigError(
                f"{type(ragged_model.model).__name__} computes other hidden states without padding than with its own "
                "attention, so it cannot be trained exactly. Use another model class."
            )
    groups = [
        group_or_none
        for group_or_none in (ragged_model.parallel_group, ragged_model.expert_parallel)
        if group_or_none is not None
    ]
    if not groups:
        return
    for group in (ragged_model.tensor_parallel, ragged_model.expert_parallel):
        if group is not None:
            shards = group.shard_model(ragged_model.model)
            ragged_model.parameter_shards |= {
                ragged_model.hf_name(f"model.{name}"): shard for name, shard in shards.items()
            }
    if parallel is not None:
        local = parallel.local_slice(len(computed))
        computed, order = computed[local], order[local]
    message = (
        f"{type(ragged_model.model).__name__} computes other hidden states when it is sharded over ranks. Set "
        f"{' and '.join(group.size_key for group in groups)} to 1."
    )
    try:
        with torch.no_grad():
            in_groups = ragged_model._hidden_states(ids[order], position_ids[order], layout.segments, parallel)
    except dist.DistError:
        raise
    except (RuntimeError, TypeError) as error:  # for example, weights for another number of heads
        raise ConfigError(f"{message} ({error})") from error
    deviation = (in_groups - computed).float().norm(dim=-1) / computed.float().norm(dim=-1)
    if not float(deviation.max()) <= (0.25 if computed.dtype.itemsize < 4 else 1e-4):
        raise ConfigError(message)


def _own_attention(ragged_model: RaggedModel, ids: Tensor) -> Tensor:
    """Return the last hidden states [T, hidden size] of one sequence with the model's own attention."""
    model: Any = ragged_model.model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), ragged_model.routers.forward_pass(None):
            hidden: Tensor = model.base_model(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state
    finally:
        model.set_attn_implementation(RAGGED_ATTENTION_NAME)
    return hidden.squeeze(0)


def is_close(tensor: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """True if two tensors are equal up to the rounding of differently shaped matrix products in `dtype`.

    Args:
        tensor: Any floating-point tensor; the absolute tolerance is relative to its largest absolute value.
        other: A tensor of the same shape and dtype.
        dtype: Dtype of the products. The relative tolerance is 0.05 in half precision, else 1e-4.
    """
    tolerance = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    return torch.allclose(tensor, other, rtol=tolerance, atol=tolerance * float(tensor.abs().amax()))


def _learned_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions of a model with learned position embeddings, such as GPT-2; None for others."""
    max_positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    token_embedding = model.get_input_embeddings()
    table_sizes = [
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not token_embedding
    ]
    # Some tables begin with two rows that belong to no position.
    return (
        max_positions if max_positions is not None and {max_positions, max_positions + 2} & set(table_sizes) else None
    )


def max_exact_length(config: Any) -> int | None:
    """Return the length beyond which a model's results depend on the rest of its batch; None if there is none.

    Longrope changes its frequencies for a full batch. For chunked attention see `max_plain_attention_length`.
    """
    limits = [
        int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in get_rope_parameters(config)
        if rope.get("rope_type") == "longrope"
    ]
    if (chunk := max_plain_attention_length(config)) is not None:
        limits.append(chunk)
    return min(limits, default=None)
