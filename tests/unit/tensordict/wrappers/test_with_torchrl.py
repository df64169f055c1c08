"""Our wrappers in TorchRL's own environment, collector and loss (the extra `torchrl`)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from skyrl_train.tensordict.containers import Tokens
from skyrl_train.tensordict.history import History
from skyrl_train.tensordict.losses.grpo import GRPOLoss
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()


@contextmanager
def quietly() -> Iterator[None]:
    """Without TorchRL's warnings of its own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def theirs(torchrl: Any) -> SimpleNamespace:
    """The parts of torchrl that the tests use."""
    return SimpleNamespace(
        LLMCollector=torchrl.collectors.llm.LLMCollector,
        History=torchrl.data.llm.History,
        ChatHistory=torchrl.modules.llm.ChatHistory,
        StepCounter=torchrl.envs.StepCounter,
        DatasetChatEnv=torchrl.envs.llm.DatasetChatEnv,
        GRPOLoss=torchrl.objectives.llm.GRPOLoss,
        SFTLoss=torchrl.objectives.llm.SFTLoss,
        RetrieveKL=torchrl.envs.llm.transforms.RetrieveKL,
    )


def collected(theirs: SimpleNamespace, policy: Any, mode: str, turns: int) -> TensorDictBase:
    """[2, turns / 2] from TorchRL's collector over its ChatEnv, two turns an episode."""
    # Its tokens mode reads ids of all rows at once, so they must be as many.
    questions = [{"query": ["10 + 1?" if mode == "tokens" else "1 + 1?", "20 + 1?"]}]
    settings = {"batch_size": (2,), "tokenizer": TOKENIZER, "input_mode": mode, "system_prompt": "Be brief."}
    with quietly():
        env = theirs.DatasetChatEnv.from_dataloader(questions, **settings)
        env = env.append_transform(theirs.StepCounter(max_steps=2))
        collector = theirs.LLMCollector(env, policy=policy, dialog_turns_per_batch=turns, total_dialog_turns=turns)
        try:
            (played,) = list(collector)
        finally:
            collector.shutdown()
    return played  # type: ignore[no-any-return]


def texts(history: Any) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in history.unbind(0)]


def test_a_wrapper_talks_in_their_environment_under_their_collector(theirs: SimpleNamespace, wrap: Any):
    policy = wrap(lambda request: [*TOKENIZER(str(len(request.token_ids)))["input_ids"], END])
    played = collected(theirs, policy, "history", 4)
    assert played.batch_size == (2, 2)
    for question, row in zip(("1 + 1?", "20 + 1?"), played.unbind(0), strict=True):
        first, second = row.unbind(0)
        assert isinstance(first.get("history"), theirs.ChatHistory)
        assert isinstance(first["history"].full, theirs.History)
        opening = [("system", "Be brief."), ("user", question)]
        said = str(len(first["tokens"].prompt))
        assert texts(first["history"].prompt) == opening
        assert texts(first["history"].full) == [*opening, ("assistant", said)]
        assert texts(second["history"].prompt) == texts(first["next", "history"].prompt) == texts(first["history"].full)
        assert texts(second["history"].full)[-1] == ("assistant", str(len(second["tokens"].prompt)))
        assert [bool(step["next", "done"].any()) for step in (first, second)] == [False, True]


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_texts_and_tokens_need_no_translation(theirs: SimpleNamespace, wrap: Any, mode: str):
    played = collected(theirs, wrap("yes", input_mode=mode), mode, 4)
    for row in played.unbind(0):
        first, second = row.unbind(0)
        prompt, full = second["tokens"].prompt.tolist(), first["tokens"].full.tolist()
        assert prompt == full
        assert str(TOKENIZER.decode(full)).endswith("assistant\nyes<|im_end|>")


END = TOKENIZER.eos_token_id


@pytest.mark.parametrize("mode", ["tokens", "history"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
def test_torchrl_grpo_loss_of_our_batch_equals_ours(theirs: SimpleNamespace, strategy: str, padded: bool, mode: str):
    model = tiny_model()
    kwargs = {"max_new_tokens": 6, "seed": 1}
    policy = TransformersWrapper(
        copy.deepcopy(model), tokenizer=TOKENIZER, input_mode=mode, generate_kwargs=kwargs, pad_output=padded
    )
    if mode == "tokens":
        prompts = [Tokens(prompt=torch.tensor(ids)) for ids in ([5, 6, 7], [8], [9, 10])]
        batch = policy(lazy_stack([TensorDict(tokens=prompt) for prompt in prompts]))
    else:
        chats = [[{"role": "user", "content": text}] for text in ("hello", "hi", "good day")]
        prompt = theirs.ChatHistory(prompt=theirs.History.from_chats(chats), batch_size=(3,))
        batch = policy(lazy_stack(list(TensorDict(history=prompt, batch_size=(3,)).unbind(0))))
    policy.close()
    batch["advantage"] = torch.tensor([1.0, -0.5, 0.25]).reshape(3, 1, 1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # so that ratios are not 1
    actor = TransformersWrapper(model, tokenizer=TOKENIZER, input_mode=mode, generate=False)
    settings: dict[str, Any] = {"clip_epsilon": (0.2, 0.28), "masking_strategy": strategy, "entropy_coeff": 0.05}
    ours = GRPOLoss(actor, **settings)(batch)
    with quietly():
        other = theirs.GRPOLoss(actor, **settings)(batch)
    assert float(ours.clip_fraction) > 0
    for name in ("loss_objective", "loss_entropy", "ESS"):
        torch.testing.assert_close(getattr(other, name).squeeze().double(), getattr(ours, name), rtol=1e-5, atol=1e-7)
    parameters = list(model.parameters())
    for mine, their in zip(
        torch.autograd.grad(ours.loss, parameters),
        torch.autograd.grad(other.loss_objective.sum() + other.loss_entropy.sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(their, mine, rtol=1e-4, atol=1e-6)


TALK = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
    [{"role": "user", "content": "and more"}, {"role": "assistant", "content": "no"}],
]


def test_torchrl_sft_loss_trains_our_scoring_wrapper(theirs: SimpleNamespace):
    model = tiny_model()
    actor = TransformersWrapper(model, tokenizer=TOKENIZER, generate=False)
    history = History.from_chats(TALK)
    batch = lazy_stack(list(TensorDict(history=theirs.ChatHistory(full=history), batch_size=(2,)).unbind(0)))
    with quietly():
        loss = theirs.SFTLoss(actor, tokenizer=TOKENIZER)(batch)
    distribution = actor.get_dist(batch, "rlhf")
    count = distribution.positions.sum(1)
    expected = -(actor.log_prob(batch) * distribution.positions).sum(1) / count
    torch.testing.assert_close(loss.loss_sft, expected.mean())
    loss.loss_sft.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("padded", [False, True])
def test_torchrl_kl_transform_reads_two_of_our_wrappers(theirs: SimpleNamespace, padded: bool):
    settings: dict[str, Any] = {"tokenizer": TOKENIZER, "generate": False, "pad_output": padded}
    policy = TransformersWrapper(tiny_model(seed=1), log_probs_key="gen_log_probs", **settings)
    reference = TransformersWrapper(tiny_model(seed=2), log_probs_key="ref_log_probs", **settings)
    batch = TensorDict(history=theirs.ChatHistory(full=theirs.History.from_chats(TALK)), batch_size=(2,))
    batch = lazy_stack(list(batch.unbind(0)))
    with quietly():
        out = theirs.RetrieveKL(gen_model=policy, ref_model=reference, add_to_reward=False, assistant_only=True)(batch)
    both = [wrapper.get_new_version(inplace=False)(batch) for wrapper in (policy, reference)]
    for place, row in enumerate(out.unbind(0)):
        mine, other = (
            one[place].get((key, "full")) for one, key in zip(both, ("gen_log_probs", "ref_log_probs"), strict=True)
        )
        mask = both[0][place]["masks"].all_assistant_mask
        expected = ((mine - other) * mask).detach()
        torch.testing.assert_close(row.get("kl_penalty").squeeze(-1)[-len(expected) :], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_logits_only_writes_logits_of_every_token(padded: bool):
    scorer = TransformersWrapper(tiny_model(), tokenizer=TOKENIZER, generate=False, pad_output=padded, inplace=False)
    batch = TensorDict(history=History.from_chats(TALK), batch_size=(2,))
    out = scorer(batch, logits_only=True)
    assert out.get("log_probs", None) is None
    scored, dist = scorer(batch), scorer.get_dist(batch)
    for logits, row, whole in zip(out["logits"].unbind(0), scored.unbind(0), dist.logits, strict=True):
        tokens = row["tokens"].full
        assert logits.shape[0] == len(tokens)
        torch.testing.assert_close(logits, whole[-len(logits) :])
