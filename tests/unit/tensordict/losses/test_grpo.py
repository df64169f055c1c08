"""GRPO on tensordicts against the trainer's own path, whatever the padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.losses import cispo, clipped_surrogate
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.reductions import assign_loss_weights, sequence_mean, token_mean
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics
from skyrl_train.tensordict.losses.grpo import CISPO, DAPO, CISPOLoss, GRPOLoss, GRPOLossOutput
from skyrl_train.tensordict.losses.scoring import _entropy
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.edge_case_batches import current_logprobs, edge_case_batch
from tests.support.tensordict_batches import LAYOUTS, BigramPolicy, TablePolicy, as_tensordict

REDUCTIONS = {"token_mean": token_mean, "prompt_mean": sequence_mean}
POLICY_LOSSES = {
    GRPOLoss: (partial(clipped_surrogate, eps_clip_low=0.2, eps_clip_high=0.2), {}),
    DAPO: (partial(clipped_surrogate, eps_clip_low=0.2, eps_clip_high=0.28), {}),
    CISPO: (partial(cispo, cispo_eps_clip_low=0.1, cispo_eps_clip_high=0.3), {"clip_epsilon": (0.1, 0.3)}),
}


def trainers(batch: TrainBatch, loss, reduction, logprobs: Tensor, entropy: Tensor | None = None, metrics=None):
    """The trainer's loss with KL (0.3) and, with entropy, a bonus (0.05)."""
    coefficient = None if entropy is None else 0.05
    objective = PolicyObjective(loss, k3, kl_loss_coef=0.3, entropy_loss_coef=coefficient)
    weighed = assign_loss_weights(batch, partial(reduction, max_seq_len=1)).with_tokens(rollout_logprobs=None)
    return objective(weighed, logprobs, entropy, int(batch.loss_mask.sum()), metrics or Metrics())


def table_of(batch: TrainBatch) -> TablePolicy:
    return TablePolicy(current_logprobs(batch))


def one_sequence(**entries: object) -> TensorDictBase:
    """Prompt 0, response 1 2 3, old log-probs -1, advantage 1."""
    found = {
        "tokens": {"full": torch.arange(4)[None], "prompt": torch.zeros(1, 1, dtype=torch.int64)},
        "masks": {"all_attention_mask": torch.ones(1, 4, dtype=torch.bool)},
        "log_probs": {"full": torch.full((1, 4), -1.0, dtype=torch.float64)},
        "advantage": torch.ones(1, 1, 1, dtype=torch.float64),
    }
    return TensorDict(found | entries, batch_size=[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", REDUCTIONS)
@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("shape", ["failed rows", "nothing counts"])
def test_loss_and_gradient_are_the_trainers_bit_by_bit(kind, aggregation: str, layout: str, shape: str):
    batch = edge_case_batch(shape)
    loss, settings = POLICY_LOSSES[kind]
    logprobs, metrics = current_logprobs(batch), Metrics()
    expected = trainers(batch, loss, REDUCTIONS[aggregation], logprobs, metrics=metrics)
    policy = table_of(batch)
    objective = kind(
        policy,
        aggregation=aggregation,
        entropy_bonus=False,
        kl_to_ref_coeff=0.3,
        masking_strategy="rlhf",
        **settings,
    )
    output = objective(as_tensordict(batch, layout))
    assert output.loss.item() == expected.item()
    (gradient,) = torch.autograd.grad(output.loss, [policy.table])
    assert torch.equal(gradient, torch.autograd.grad(expected, logprobs)[0])
    report = metrics.flush()
    if report:
        assert output.clip_fraction.item() == pytest.approx(report["policy/clip_ratio"], rel=1e-12)
        assert output.kl_to_ref.item() == pytest.approx(report["policy/kl"], rel=1e-12)
    assert output.entropy is None and output.loss_kl_to_inference is None


@pytest.mark.defect("D24")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_a_distribution_the_entropy_bonus_is_the_trainers(layout: str):
    batch = edge_case_batch("regular")
    policy = BigramPolicy(len(batch.input_ids))
    distribution = torch.distributions.Categorical(logits=policy.weight[batch.input_ids.roll(1)])
    logprobs = distribution.log_prob(batch.input_ids)
    expected = trainers(batch, POLICY_LOSSES[GRPOLoss][0], token_mean, logprobs, distribution.entropy())
    objective = GRPOLoss(policy, entropy_coeff=0.05, kl_to_ref_coeff=0.3, masking_strategy="rlhf")
    output = objective(as_tensordict(batch, layout))
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    theirs, ours = (torch.autograd.grad(loss, [policy.weight])[0] for loss in (expected, output.loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(output.entropy, distribution.entropy()[batch.loss_mask].mean().detach())


def test_gradients_match_finite_differences():
    data = one_sequence(next={"ref_log_probs": {"full": torch.full((1, 4), -1.2, dtype=torch.float64)}})

    def loss(table: Tensor) -> Tensor:
        def actor(rows: TensorDictBase) -> TensorDictBase:
            return rows.set(("log_probs", "full"), table[None])

        return GRPOLoss(actor, entropy_bonus=False, kl_to_ref_coeff=0.3, kl_to_inference_coeff=0.1)(data).loss

    table = torch.tensor([-9.0, -1.1, -0.9, -1.6], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (table,))


def test_the_rectangle_is_what_a_reduction_would_add():
    batch = edge_case_batch("regular")
    data = as_tensordict(batch, "all left")
    settings: dict[str, Any] = {"entropy_bonus": False, "masking_strategy": "rlhf"}
    each = GRPOLoss(table_of(batch), reduction="none", **settings)(data).loss_objective
    assert each.shape == data["tokens", "full"].shape
    assert not each[~data["masks", "all_assistant_mask"]].any()
    mean = GRPOLoss(table_of(batch), **settings)(data).loss_objective
    total = GRPOLoss(table_of(batch), reduction="sum", **settings)(data).loss_objective
    torch.testing.assert_close(each.sum(), total)
    torch.testing.assert_close(total / batch.loss_mask.sum(), mean)


@pytest.mark.defect("D23")
def test_cispo_keeps_the_gradient_of_clipped_tokens_and_none_through_the_ratio():
    policy = TablePolicy(torch.tensor([0.0, -0.2, -1.0, -1.1], dtype=torch.float64))
    CISPOLoss(policy, clip_epsilon=0.2, entropy_bonus=False)(one_sequence()).loss.backward()
    weights = torch.tensor([0.8, 0.0, -0.1], dtype=torch.float64).exp().clamp(0.8, 1.2)
    torch.testing.assert_close(policy.table.grad, torch.cat([torch.zeros(1).double(), -weights / 3]))


def clips(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Where 0.8 to 1.2 takes the gradient away."""
    return ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))


@pytest.mark.defect("D24")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_are_means_over_the_tokens_that_count(layout: str):
    batch = edge_case_batch("failed rows")
    chosen = batch.loss_mask
    logprobs = current_logprobs(batch).detach()
    objective = GRPOLoss(
        table_of(batch), entropy_bonus=False, kl_to_ref_coeff=1.0, kl_to_inference_coeff=0.5, masking_strategy="rlhf"
    )
    output = objective(as_tensordict(batch, layout))
    assert batch.ref_logprobs is not None and batch.old_logprobs is not None and batch.advantages is not None
    back = (batch.ref_logprobs - logprobs)[chosen]
    to_sampler = (batch.old_logprobs - logprobs)[chosen]
    ratio = (-to_sampler).exp()
    by_hand = {
        "kl_to_ref": (back.exp() - 1 - back).mean(),
        "loss_kl_to_ref": (back.exp() - 1 - back).mean(),
        "kl_to_inference": (to_sampler.exp() - 1 - to_sampler).mean(),
        "loss_kl_to_inference": (to_sampler.exp() - 1 - to_sampler).mean() / 2,
        "kl_approx": to_sampler.mean(),
        "ESS": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
        "clip_fraction": clips(ratio, batch.advantages[chosen]).double().mean(),
    }
    for name, value in by_hand.items():
        torch.testing.assert_close(getattr(output, name).detach(), value, msg=name)


def test_losses_and_outputs_are_torchrls(torchrl: Any):
    theirs = torchrl.objectives.llm
    for ours, loss, output in (
        (GRPOLoss, theirs.GRPOLoss, theirs.GRPOLossOutput),
        (DAPO, theirs.DAPO, theirs.DAPOLossOutput),
        (CISPOLoss, theirs.CISPOLoss, theirs.CISPOLossOutput),
    ):
        objective = ours(BigramPolicy(4), ref_log_prob_padding_side="right")
        assert isinstance(objective, loss)
        found = objective(one_sequence())
        assert isinstance(found, output) and found.loss == found.loss_objective + found.loss_entropy
        objective.clip_epsilon_high = 0.5  # a schedule of TorchRL sets the buffer
        assert objective.clip_epsilon[1] == 0.5


@pytest.mark.parametrize("mode", ["history", "tokens"])
def test_torchrls_wrapper_can_be_the_actor(torchrl: Any, mode: str):
    model, tokenizer = tiny_model(), byte_tokenizer()
    data = as_tensordict(edge_case_batch("regular"), "ragged")
    for row in data.unbind(0):
        row["tokens"].apply_(lambda ids: ids % 64)
    losses = []
    for wrapper in (torchrl.modules.llm.TransformersWrapper, TransformersWrapper):
        actor = wrapper(model, tokenizer=tokenizer, generate=False, input_mode=mode)
        losses.append(GRPOLoss(actor)(data))
    for name in ("loss_objective", "entropy", "ESS"):
        torch.testing.assert_close(getattr(losses[0], name), getattr(losses[1], name), rtol=1e-5, atol=1e-6)


@pytest.mark.defect("D25")
def test_dapo_can_be_made_and_its_upper_bound_is_wider():
    assert DAPO(TablePolicy(torch.zeros(1))).clip_epsilon == (0.2, 0.28)
    table = torch.full((4,), -1 + 0.24, dtype=torch.float64)  # a ratio of 1.27
    assert DAPO(TablePolicy(table), entropy_bonus=False)(one_sequence()).clip_fraction == 0
    assert GRPOLoss(TablePolicy(table), entropy_bonus=False)(one_sequence()).clip_fraction == 1


@pytest.mark.defect("D25")
def test_every_key_can_be_set_also_that_of_the_reference():
    batch = edge_case_batch("regular")
    data = as_tensordict(batch, "ragged")
    moved = data.clone()
    for key, name in ((("log_probs", "full"), "old"), (("next", "ref_log_probs", "full"), "ref"), ("advantage", "A")):
        moved.rename_key_(key, name)
    objective = GRPOLoss(table_of(batch), entropy_bonus=False, kl_to_ref_coeff=1.0)
    expected = objective(data).loss
    objective.set_keys(sample_log_prob="old", ref_log_probs="ref", advantage="A")
    assert objective(moved).loss.item() == expected.item()
    assert {"old", "ref", "A"} <= set(objective.in_keys)
    with pytest.raises(ValueError, match="logits is not an accepted tensordict key"):
        objective.set_keys(logits="x")


@pytest.mark.defect("D25")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masking_strategies_choose_their_tokens(layout: str):
    batch = edge_case_batch("regular")  # of two turns, with a token of the environment between them
    data = as_tensordict(batch, layout)
    if layout == "all left":
        data["tokens", "prompt"] = torch.full((len(batch), 1), 9999)  # not what rows begin with
        with pytest.raises(ValueError, match="does not begin with its prompt"):
            chosen(data, "sft", batch)
    if "prompt" in set(data[0]["tokens"].keys()) and layout != "all left":
        behind = batch.position_ids >= batch.expand_to_tokens(batch.prompt_lengths)
        assert torch.equal(chosen(data, "sft", batch), behind)
    assert torch.equal(chosen(data, "rlhf", batch), batch.loss_mask)
    assert torch.equal(chosen(data, "generic", batch), batch.position_ids > 0)


def chosen(data: TensorDictBase, strategy: str, batch: TrainBatch) -> Tensor:
    policy = table_of(batch)
    GRPOLoss(policy, entropy_bonus=False, masking_strategy=strategy, clip_epsilon=99.0)(data).loss.backward()
    assert policy.table.grad is not None
    return policy.table.grad.bool()


def test_tokens_far_from_the_sampling_policy_can_be_masked():
    policy = TablePolicy(torch.tensor([0.0, -1.1, -3.5, -0.9], dtype=torch.float64))
    GRPOLoss(policy, entropy_bonus=False, kl_mask_threshold=2.0)(one_sequence()).loss.backward()
    assert policy.table.grad is not None
    assert policy.table.grad.bool().tolist() == [False, True, False, True]


def test_the_input_stays_as_it_is_and_2d_batches_are_flattened():
    data = one_sequence()
    policy = TablePolicy(torch.full((4,), -1.3, dtype=torch.float64))
    objective = GRPOLoss(policy, entropy_bonus=False)
    before = data.clone()
    flat = objective(data)
    assert (data == before).all() and set(data.keys(True)) == set(before.keys(True))
    again = objective(torch.stack([torch.stack([data[0], data[0]])]))
    assert again.batch_size == torch.Size([]) and isinstance(again, GRPOLossOutput)
    torch.testing.assert_close(again.loss, flat.loss)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_epsilon": -0.1}, "clip_epsilon=-0.1"),
        ({"clip_epsilon": (0.1, -0.1)}, "clip_epsilon"),
        ({"clip_epsilon": (0.1, 0.2, 0.3)}, "clip_epsilon=.0.1, 0.2, 0.3"),
        ({"clip_epsilon": "0.2"}, "clip_epsilon='0.2'"),
        ({"aggregation": "batch_mean"}, "token_mean, prompt_mean, none"),
        ({"reduction": "median"}, "mean, sum, none"),
        ({"masking_strategy": "all"}, "sft, rlhf, generic"),
        ({"gamma": 0.9}, "gamma=0.9"),
        ({"clip_value": 1.0}, "clip_value=1.0"),
        ({"samples_mc_entropy": 0}, "samples_mc_entropy=0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        GRPOLoss(TablePolicy(torch.zeros(4)), **settings)


def test_sampled_entropy_has_gradient_of_entropy():
    logits = torch.tensor([[[3.0, 1.0]]]).double().log().requires_grad_()

    class Proportions(torch.distributions.Categorical):
        """Probabilities 3/4 and 1/4, sampled in exactly these proportions, without an entropy."""

        def sample(self, sample_shape: Any = None) -> Tensor:
            return torch.tensor([0, 0, 0, 1]).reshape(4, 1, 1)

        def entropy(self) -> Tensor:
            raise NotImplementedError

    expected = torch.distributions.Categorical(logits=logits).entropy()
    estimate = _entropy(Proportions(logits=logits), 4)
    torch.testing.assert_close(estimate, expected)
    found, exact = (torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (estimate, expected))
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(
    ("missing", "error"),
    [("advantage", ValueError), (("tokens", "full"), ValueError), (("log_probs", "full"), KeyError)],
)
def test_a_missing_entry_is_named(missing, error: type[Exception]):
    data = one_sequence().exclude(missing)
    with pytest.raises(error, match="entries are"):
        GRPOLoss(TablePolicy(torch.zeros(4)), entropy_bonus=False)(data)


def test_shapes_that_differ_and_gradients_of_constants_are_refused():
    objective = GRPOLoss(TablePolicy(torch.zeros(4).double()), entropy_bonus=False, kl_to_ref_coeff=1.0)
    with pytest.raises(KeyError, match=r"ref log-prob.*Append KLRewardTransform.*set_keys"):
        objective(one_sequence())
    with pytest.raises(ValueError, match=r"'advantage' has shape \[1, 3\]; tokens have \[1, 4\]"):
        objective(one_sequence(advantage=torch.zeros(1, 3)))
    with pytest.raises(ValueError, match="log_probs"):
        objective(one_sequence(log_probs={"full": torch.zeros(1, 5)}))
    with pytest.raises(RuntimeError, match="requires a gradient"):
        objective(one_sequence(log_probs={"full": torch.zeros(1, 4, requires_grad=True)}))


def test_what_a_policy_cannot_do_is_said():
    policy = TablePolicy(torch.zeros(9).double())
    with pytest.raises(ValueError, match="entropy_bonus=False"):
        GRPOLoss(policy)(one_sequence())
    with pytest.raises(ValueError, match="no actor_network"):
        GRPOLoss()(one_sequence())
    with pytest.raises(KeyError, match="policy's log-probs"):
        GRPOLoss(lambda rows: rows, entropy_bonus=False)(one_sequence())
    other = GRPOLoss(lambda rows: policy(rows.set(("tokens", "full"), rows["tokens", "full"] + 1)), entropy_bonus=False)
    with pytest.raises(ValueError, match="other tokens than those that were sampled"):
        other(one_sequence())
    policy.generate = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="generate=False"):
        GRPOLoss(policy)


def test_a_rectangle_without_an_attention_mask_is_not_guessed_at():
    twice: Any = torch.cat([one_sequence(), one_sequence()])  # type: ignore[list-item]
    data = twice.exclude(("masks", "all_attention_mask"))
    for strategy in ("sft", "generic"):
        objective = GRPOLoss(TablePolicy(torch.zeros(4)), entropy_bonus=False, masking_strategy=strategy)
        with pytest.raises(ValueError, match="otherwise padding looks like tokens"):
            objective(data)


@pytest.mark.defect("zero-kl-coefficient-needs-reference")
def test_a_kl_coefficient_of_zero_needs_no_reference():
    policy = BigramPolicy(4)
    plain = GRPOLoss(policy, entropy_bonus=False)(one_sequence())
    loss = GRPOLoss(policy, entropy_bonus=False, kl_to_ref_coeff=0.0)
    assert loss.out_keys == ["loss_objective", "clip_fraction", "kl_approx", "ESS"]
    found = loss(one_sequence())
    assert found.kl_to_ref is None and torch.equal(found.loss, plain.loss)
