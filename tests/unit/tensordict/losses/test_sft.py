"""Supervised losses on tensordicts against the trainer's own path."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from skyrl_train.algorithms.reductions import assign_loss_weights, sequence_mean
from skyrl_train.algorithms.sft import SFTObjective, minor_sft, sft
from skyrl_train.metrics import Metrics
from skyrl_train.tensordict.containers import ChatHistory
from skyrl_train.tensordict.history import History
from skyrl_train.tensordict.losses.sft import SFTLoss
from skyrl_train.tensordict.ragged import rows_of
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.edge_case_batches import current_logprobs, edge_case_batch
from tests.support.tensordict_batches import LAYOUTS, TablePolicy, as_tensordict

BATCH = edge_case_batch("regular")
LENGTHS = BATCH.sum_per_sequence(BATCH.loss_mask.double())


def policy() -> TablePolicy:
    return TablePolicy(current_logprobs(BATCH))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["sft", "minor_sft"])
def test_loss_and_gradient_are_the_trainers_bit_by_bit(name: str, layout: str):
    function = sft if name == "sft" else partial(minor_sft, minor_beta=0.3)
    batch, logprobs = assign_loss_weights(BATCH, partial(sequence_mean, max_seq_len=1)), current_logprobs(BATCH)
    expected = SFTObjective(function)(batch, logprobs, None, 1, Metrics())
    actor = policy()
    objective = SFTLoss(actor, loss_function=name, beta=0.3, normalize_by_seq_length=name == "sft")
    output = objective(as_tensordict(BATCH, layout))
    assert output.loss.item() == expected.item()
    (gradient,) = torch.autograd.grad(output.loss, [actor.table])
    assert torch.equal(gradient, torch.autograd.grad(expected, logprobs)[0])


@pytest.mark.parametrize("normalise", [True, False])
def test_reductions_are_over_sequences(normalise: bool):
    data = as_tensordict(BATCH, "ragged")
    logprobs = torch.where(BATCH.loss_mask, current_logprobs(BATCH).detach(), 0.0)
    expected = -BATCH.sum_per_sequence(logprobs) / (LENGTHS if normalise else 1)
    made = {
        reduction: SFTLoss(policy(), reduction=reduction, normalize_by_seq_length=normalise)(data).loss_sft.detach()
        for reduction in ("none", "sum", "mean")
    }
    torch.testing.assert_close(made["none"], expected)
    torch.testing.assert_close(made["sum"], expected.sum())
    torch.testing.assert_close(made["mean"], expected.mean())


def test_minor_sft_may_compare_means():
    assert BATCH.ref_logprobs is not None
    gaps = torch.where(BATCH.loss_mask, current_logprobs(BATCH).detach() - BATCH.ref_logprobs, 0.0)
    expected = -torch.nn.functional.logsigmoid(0.1 * BATCH.sum_per_sequence(gaps) / LENGTHS)
    output = SFTLoss(policy(), loss_function="minor_sft", reduction="none")(as_tensordict(BATCH, "ragged"))
    torch.testing.assert_close(output.loss_sft.detach(), expected)


@pytest.mark.defect("D28")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kl_is_a_mean_over_what_the_assistant_said(layout: str):
    assert BATCH.ref_logprobs is not None
    back = (BATCH.ref_logprobs - current_logprobs(BATCH).detach())[BATCH.loss_mask]
    output = SFTLoss(policy(), kl_to_ref_coeff=0.5)(as_tensordict(BATCH, layout))
    torch.testing.assert_close(output.kl_to_ref, (back.exp() - 1 - back).mean())
    torch.testing.assert_close(output.loss, output.loss_sft + 0.5 * output.kl_to_ref)


@pytest.mark.defect("D28")
def test_one_conversation_without_the_assistant_is_refused():
    batch = edge_case_batch("failed rows")
    objective = SFTLoss(TablePolicy(current_logprobs(batch)))
    with pytest.raises(ValueError, match="no tokens of the assistant to train on: rows 1, 3, 4"):
        objective(as_tensordict(batch, "ragged"))


class Chat:
    """Stands in for a History: two conversations, templated as the rows of BATCH."""

    def __init__(self, row: TensorDictBase):
        self.row = row

    def apply_chat_template(self, **settings: object) -> dict[str, torch.Tensor]:
        assert settings["tokenizer"] == "tokenizer" and settings["return_assistant_tokens_mask"]
        assert settings["add_generation_prompt"] is False and settings.pop("chat_template") == "mine"
        masks = self.row["masks"]
        return {
            "input_ids": self.row["tokens", "full"][None],
            "attention_mask": masks["all_attention_mask"][None].long(),
            "assistant_masks": masks["all_assistant_mask"][None].long(),
        }


@pytest.mark.defect("D28")
def test_histories_are_tokenised_without_touching_the_settings():
    rows = as_tensordict(BATCH, "ragged")
    expected = SFTLoss(policy())(rows).loss
    chats = []
    for row in rows.unbind(0):
        chat = row.select("next")
        chat["history", "full"] = NonTensorData(Chat(row))
        chats.append(chat)
    kwargs = {"chat_template": "mine"}
    data = lazy_stack(chats)
    assert SFTLoss(policy(), tokenizer="tokenizer", tokenizer_kwargs=kwargs)(data).loss.item() == expected.item()
    assert kwargs == {"chat_template": "mine"}
    assert set(data[0].keys()) == {"next", "history"}

    def templating(conversations: TensorDictBase) -> TensorDictBase:
        """A wrapper in history mode: it makes tokens and masks, and scores them."""
        made = rows.select("tokens", "masks")
        assert len(rows_of(conversations)) == len(BATCH)
        return policy()(made)

    assert SFTLoss(templating)(data).loss.item() == expected.item()


@pytest.mark.parametrize("mode", ["history", "tokens"])
def test_a_wrapper_is_trained_on_histories_by_its_own_template(mode: str):
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}assistant: {% endif %}"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = TensorDict(history=ChatHistory(full=History.from_chats([chat, chat]), batch_size=(2,)), batch_size=(2,))
    settings: dict[str, Any] = {"chat_template": template, "generate": False, "input_mode": mode}
    model, tokenizer = tiny_model(), byte_tokenizer()
    actor = TransformersWrapper(model, tokenizer=tokenizer, **settings)
    loss = SFTLoss(actor).forward(rows).loss
    assert loss.item() == SFTLoss(actor, tokenizer=tokenizer, tokenizer_kwargs={"chat_template": template})(rows).loss
    prompt, answer = tokenizer("user: hi\nassistant: ")["input_ids"], tokenizer("yes\n")["input_ids"]
    logs = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    wanted = -logs.gather(-1, torch.tensor(answer)[:, None]).mean()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    loss.backward()
    assert model.lm_head.weight.grad.any()


def test_settings_are_checked():
    wrong: list[dict[str, Any]] = [{"reduction": "median"}, {"loss_function": "dpo"}]
    for settings in wrong:
        with pytest.raises(ValueError, match="must be one of"):
            SFTLoss(policy(), **settings)
    with pytest.raises(ValueError, match="no actor_network"):
        SFTLoss(None)(as_tensordict(BATCH, "ragged"))
    with pytest.raises(KeyError, match="ref log-prob"):
        SFTLoss(policy(), kl_to_ref_coeff=1.0)(as_tensordict(BATCH, "ragged").exclude(("next", "ref_log_probs")))


@pytest.mark.defect("zero-kl-coefficient-needs-reference")
def test_a_kl_coefficient_of_zero_needs_no_reference():
    batch = as_tensordict(BATCH, "ragged").exclude("next")
    plain, off = SFTLoss(policy()), SFTLoss(policy(), kl_to_ref_coeff=0.0)
    assert off.out_keys == ["loss_sft"] and off.in_keys == plain.in_keys
    assert torch.equal(off(batch).loss, plain(batch).loss)
