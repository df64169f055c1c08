"""The wrapper over the engine in this process: log-probs are the model's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.containers import ChatHistory, Tokens
from skyrl_train.tensordict.history import History
from skyrl_train.tensordict.losses.scoring import score, token_mask
from skyrl_train.tensordict.ragged import TokenLayout
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.tensordict.wrappers.distributions import LLMMaskedCategorical
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def wrapper(model: Any) -> Iterator[TransformersWrapper]:
    kwargs = {"max_new_tokens": 6, "seed": 1, "ignore_eos": True}
    made = TransformersWrapper(copy.deepcopy(model), tokenizer=TOKENIZER, generate_kwargs=kwargs, inplace=False)
    yield made
    made.close()


def chats() -> TensorDict:
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    history = History.from_chats([chat, chat[1:]])
    return TensorDict(history=ChatHistory(prompt=history, batch_size=(2,)), batch_size=(2,))


def one_by_one(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logs.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)


def test_batch_of_threads_keeps_gradient_modes(model: Any):
    settings: dict[str, Any] = {"min_batch_size": 4, "batching_timeout": 0.2, "inplace": False}
    scorer = TransformersWrapper(model, tokenizer=TOKENIZER, input_mode="tokens", generate=False, **settings)
    given = TensorDict(tokens=Tokens(full=torch.tensor([[1, 2, 3]]), batch_size=(1,)), batch_size=(1,))

    def scored(gradients: bool) -> bool:
        with torch.set_grad_enabled(gradients):
            return bool(scorer(given)[0]["log_probs"].full.requires_grad)

    modes = [True, False, True, False]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(scored, modes)) == modes


@pytest.mark.defect("D01")
@pytest.mark.defect("D18")
def test_generated_log_probs_are_the_models_the_first_included(wrapper: Any, model: Any):
    out = wrapper(chats())
    for row in out.unbind(0):
        expected = one_by_one(model, row["tokens"].full.tolist())[len(row["tokens"].prompt) - 1 :]
        torch.testing.assert_close(row["log_probs"].response, expected, atol=1e-4, rtol=0)
        assert row["log_probs"].response[0] < 0


def test_text_converts_to_tokens_of_different_lengths(wrapper: Any):
    out = wrapper(chats())
    read = out["text"].to_tokens(TOKENIZER)
    for found, row in zip(read.get("prompt", as_list=True), out.unbind(0), strict=True):
        assert found.tolist() == row["tokens"].prompt.tolist()


@pytest.mark.defect("D19")
def test_scores_of_engine_and_module_agree_with_a_forward_of_each_alone(wrapper: Any, model: Any):
    rows = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    td = lazy_stack([TensorDict(tokens=torch.tensor(row)) for row in rows])
    engine = wrapper.get_new_version(generate=False, input_mode="tokens", generate_kwargs=None)
    module = TransformersWrapper(model, tokenizer=TOKENIZER, generate=False, input_mode="tokens", inplace=False)
    for scorer in (engine, module):
        found = scorer(td).get(("log_probs", "full"), as_list=True)
        for row, logs in zip(rows, found, strict=True):
            assert logs[0] == 0
            torch.testing.assert_close(logs[1:], one_by_one(model, row), atol=1e-4, rtol=0)
    padded = module.log_prob(td)
    assert padded.requires_grad
    torch.testing.assert_close(padded[1].detach()[-1:], one_by_one(model, rows[1]), atol=1e-4, rtol=0)
    assert padded[1].tolist()[:3] == [0, 0, 0]


@pytest.mark.defect("D19")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_texts_of_different_lengths_are_scored_as_alone_whatever_the_attention(attention: str):
    own = tiny_model()
    own.set_attn_implementation(attention)
    scorer = TransformersWrapper(own, tokenizer=TOKENIZER, generate=False, input_mode="text", inplace=False)
    out = scorer(TensorDict(text=["what follows", "hi", "a bit longer than that"], batch_size=(3,)))
    distributions = scorer.get_dist(TensorDict(text=["what follows", "hi"], batch_size=(2,)))
    for row in out.unbind(0):
        ids = row["tokens"].full.tolist()
        assert row["log_probs"].full[0] == 0
        torch.testing.assert_close(row["log_probs"].full[1:], one_by_one(own, ids), atol=1e-5, rtol=0)
    short = out[1]["tokens"].full  # in a padded batch
    torch.testing.assert_close(
        distributions.logits[1, -1:].log_softmax(-1).gather(-1, short[-1:, None]).squeeze(-1),
        one_by_one(own, short.tolist())[-1:],
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.defect("D19")
def test_log_probs_of_a_module_in_bfloat16_are_those_of_its_logits_in_float32():
    own = tiny_model().bfloat16()
    scorer = TransformersWrapper(own, tokenizer=TOKENIZER, generate=False, input_mode="tokens", inplace=False)
    rows = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        logs = own(rows).logits[0, :-1].float().log_softmax(-1)
    expected = logs.gather(-1, rows[0, 1:, None]).squeeze(-1)
    td = TensorDict(tokens=rows, batch_size=(1,))
    distribution = scorer.get_dist(td)
    for found in (distribution.log_prob(rows)[0, 1:], scorer(td)["log_probs"][0].full[1:]):
        torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(distribution.entropy()[0, 1:].detach(), -(logs.exp() * logs).sum(-1), atol=1e-5, rtol=0)


@pytest.mark.gpu
def test_a_batch_on_the_cpu_is_scored_by_a_module_on_the_accelerator():
    own: Any = tiny_model()
    own.to("cuda")
    scorer = TransformersWrapper(own, tokenizer=TOKENIZER, generate=False, input_mode="tokens", inplace=False)
    td = lazy_stack([TensorDict(tokens=Tokens(full=torch.tensor(row))) for row in ([5, 6, 7], [8, 9])])
    td = scorer(td)
    distribution = scorer.get_dist(td)
    assert distribution.positions.is_cuda
    assert distribution.log_prob(torch.zeros(2, 3, dtype=torch.int64)).is_cuda
    for actor in (scorer, lambda given: scorer(given)):
        entropy = actor is scorer
        found = score(actor, td, ("tokens", "full"), "generic", entropy=entropy)
        assert not found.logprobs.is_cuda
        assert not found.mask.is_cuda
        torch.testing.assert_close(
            found.logprobs.detach(), torch.cat(td.get(("log_probs", "full"), as_list=True)), atol=1e-4, rtol=0
        )


@pytest.mark.defect("D15")
@pytest.mark.defect("D25")
def test_distributions_count_what_the_losses_count(model: Any):
    """Two turns of the assistant, the first in the prompt: the masks differ, and mean the same in both places."""
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "no"},
    ]
    scorer = TransformersWrapper(model, tokenizer=TOKENIZER, generate=False, inplace=False)
    scored = scorer(TensorDict(history=History.from_chats([chat, chat[:2]]), batch_size=(2,)))
    lengths = [len(ids) for ids in scored.get(("tokens", "full"), as_list=True)]
    prompts = [lengths[1] + 10, 5]
    rows = [
        TensorDict(
            tokens=Tokens(full=row["tokens"].full, prompt=row["tokens"].full[:length]),
            masks=row["masks"].to_tensordict(),
        )
        for row, length in zip(scored.unbind(0), prompts, strict=True)
    ]
    td = lazy_stack(rows)
    policy = scorer.get_new_version(input_mode="tokens")
    layout = TokenLayout.of([row["tokens"].full for row in rows], None)
    counted = {}
    for strategy in ("sft", "rlhf", "generic"):
        wanted = token_mask(td, [row["tokens"].full for row in rows], layout, strategy)
        positions = policy.get_dist(td, strategy).positions
        assert torch.equal(positions, layout.unflatten(wanted.int()).bool()), strategy
        assert torch.equal(getattr(policy, f"_get_{strategy}_dist")(td).positions, positions)
        counted[strategy] = positions.sum(1).tolist()
    assert counted["rlhf"] == [4 + 3, 4]  # yes, no, and the ends of their turns
    assert counted["sft"] == [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    assert counted["generic"] == [length - 1 for length in lengths]


def test_a_distribution_of_a_mask_of_ones_own_and_of_rows_read_alone(model: Any):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    td = TensorDict(history=History.from_chats([chat, [*chat, *chat]]), batch_size=(2,))
    scorer = TransformersWrapper(model, tokenizer=TOKENIZER, generate=False)
    sft = scorer.get_dist(td, "sft")
    assert sft.positions.sum(1).tolist() == [4, 8]  # no prompt is given: the assistant's
    custom = torch.zeros_like(sft.positions)
    assert scorer.get_dist(td, custom).entropy().sum() == 0
    assert sft.entropy()[~sft.positions].sum() == 0
    drawable = torch.ones_like(sft.logits, dtype=torch.bool)
    drawable[..., 100:] = False  # tokens that cannot be drawn, everywhere
    assert int(scorer.get_dist(td, drawable).sample().max()) < 100
    alone = scorer.get_new_version(pad_model_input=False).get_dist(td, "sft")
    torch.testing.assert_close(alone.logits[sft.positions], sft.logits[sft.positions], atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="mask"):
        scorer.get_dist(td, "some")
    scored = scorer(td)
    assert [key in scored.keys(include_nested=True) for key in scorer.log_prob_keys] == [False, True]
    torch.testing.assert_close(scorer.log_prob(td)[1].detach(), scored[1]["log_probs"].full, atol=1e-4, rtol=0)


def test_there_is_no_distribution_without_logits(wrapper: Any):
    with pytest.raises(NotImplementedError, match="generate"):
        wrapper.get_dist(chats())
    bare = LLMWrapperBase(wrapper.engine, tokenizer=TOKENIZER, generate=False, input_mode="tokens")
    with pytest.raises(NotImplementedError, match="logits"):
        bare.get_dist(TensorDict(tokens=torch.tensor([1, 2])))


def test_a_seed_repeats_and_a_version_shares_the_engine(wrapper: Any):
    again = wrapper.get_new_version(pad_output=True)
    assert again.engine is wrapper.engine
    first, second = wrapper(chats()), again(chats())
    responses = [row.tolist() for row in first.get(("tokens", "response"), as_list=True)]
    assert responses == second["tokens"].response.tolist()


def test_a_masked_categorical_of_tokens_and_of_positions():
    logits = torch.tensor([[[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]]])
    tokens = LLMMaskedCategorical(logits, torch.tensor([[[True, True, False], [False, False, False]]]))
    torch.testing.assert_close(tokens.log_prob(torch.tensor([[0, 0]])), torch.tensor([[0.5, 1.0]]).log())
    torch.testing.assert_close(tokens.entropy(), torch.tensor([[2.0, 1.0]]).log())
    learnt = logits.clone().requires_grad_()
    drawable = torch.tensor([[[True, True, False], [False, False, False]]])
    LLMMaskedCategorical(learnt + torch.tensor([1.0, 0.0, 0.0]), drawable).entropy().sum().backward()
    assert learnt.grad is not None
    assert learnt.grad.isfinite().all()
    assert learnt.grad[0, 0, 0] < 0 < learnt.grad[0, 0, 1]
    positions = LLMMaskedCategorical(logits, torch.tensor([[False, True]]))
    assert positions.sample().tolist()[0][0] == -100
    assert positions.log_prob(torch.tensor([[0, -100]])).tolist() == [[0.0, 0.0]]
    with pytest.raises(ValueError, match="mask"):
        LLMMaskedCategorical(logits, torch.ones(3, dtype=torch.bool))


def state_of(module: Any) -> list[Any]:
    """Return the state that a wrapper might change: attention, mode, gradients, dtypes, classes of layers, hooks."""
    layers = [(type(layer), layer.training, len(layer._forward_hooks)) for layer in module.modules()]
    return [module.config._attn_implementation, layers, [(p.requires_grad, p.dtype) for p in module.parameters()]]


@pytest.mark.defect("wrapper-modifies-module")
def test_a_module_stays_as_it_was_under_two_wrappers_and_after_them():
    own: Any = tiny_model()
    own.train()
    own.set_attn_implementation("sdpa")
    own.get_input_embeddings().weight.requires_grad_(False)
    before, ids = state_of(own), torch.tensor([[5, 6, 7]])
    expected = own(ids).logits
    settings: dict[str, Any] = {"tokenizer": TOKENIZER, "inplace": False}
    policy, other = (TransformersWrapper(own, generate_kwargs={"max_new_tokens": 2}, **settings) for _ in range(2))
    scorer = TransformersWrapper(own, generate=False, **settings)
    assert policy.model is other.model is scorer.model is own
    for wrapper in (policy, other):
        scored = scorer(wrapper(chats()))
        assert state_of(own) == before
        torch.testing.assert_close(own(ids).logits, expected)
        wrapper.close()
        assert all(logs.isfinite().all() for logs in scored.get(("log_probs", "full"), as_list=True))
    own(ids).logits.sum().backward()
    assert state_of(own) == before


@pytest.mark.defect("wrapper-modifies-module")
def test_a_policy_samples_from_the_weights_that_its_module_has_now():
    own: Any = tiny_model()
    settings: dict[str, Any] = {"tokenizer": TOKENIZER, "inplace": False}
    kwargs = {"max_new_tokens": 4, "ignore_eos": True}
    with closing(TransformersWrapper(own, generate_kwargs=kwargs, **settings)) as policy:
        policy(chats())
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        for row in policy(chats()).unbind(0):
            expected = one_by_one(own, row["tokens"].full.tolist())[len(row["tokens"].prompt) - 1 :]
            torch.testing.assert_close(row["log_probs"].response, expected, atol=1e-4, rtol=0)
        scorer = policy.get_new_version(generate=False, input_mode="tokens")
        assert scorer.log_prob(TensorDict(tokens=torch.tensor([[5, 6, 7]]), batch_size=(1,))).requires_grad
        own.double()
        with pytest.raises(ConfigError, match="moved, cast or assigned"):
            policy(chats())


def test_a_path_gives_a_module_to_run_and_train(tiny_model_path: str):
    kwargs = {"max_new_tokens": 1}
    with closing(TransformersWrapper(tiny_model_path, dtype="bfloat16", generate_kwargs=kwargs)) as policy:
        policy(chats())
        assert policy.model.dtype == torch.bfloat16
        assert policy.model(torch.tensor([[5, 6]])).logits.requires_grad
        with pytest.raises(ConfigError, match="dtype"):
            TransformersWrapper(policy.model, tokenizer=TOKENIZER, dtype="float32")
        again = policy.get_new_version(generate=False).get_new_version(generate=True)
        assert again.engine is policy.engine and again.model is policy.model


def test_a_scorers_new_version_may_generate():
    own = tiny_model()
    scorer = TransformersWrapper(own, tokenizer=TOKENIZER, generate=False, generate_kwargs={"max_new_tokens": 2})
    policy = scorer.get_new_version(generate=True)
    assert len(policy(chats())[0]["tokens"].response) <= 2
    policy.close()


def test_pickled_wrapper_samples_from_its_own_model():
    model, kwargs = tiny_model(), {"max_new_tokens": 5, "temperature": 0.0}
    prompt = TensorDict(text=["abc"], batch_size=(1,))
    with closing(
        TransformersWrapper(
            model, tokenizer=byte_tokenizer(), input_mode="text", generate_kwargs=kwargs, max_num_seqs=2, inplace=False
        )
    ) as original:
        version = original.get_new_version(return_log_probs=False)
        before = original(prompt)["text"].response
        pickled = pickle.dumps(version)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        assert original(prompt)["text"].response != before
        with closing(pickle.loads(pickled)) as copied:
            answer = copied(prompt)
    assert answer["text"].response == before and "log_probs" not in answer.keys()  # noqa: SIM118 - a tensordict
    assert copied.model is not model
