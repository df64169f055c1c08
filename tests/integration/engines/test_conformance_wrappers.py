"""The use cases of TorchRL's wrapper tutorial, and exact log-probs, with the same assertions on every engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from skyrl_train.errors import ConfigError
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.tensordict.collectors.vllm_updater import vLLMUpdater
from skyrl_train.tensordict.containers import ChatHistory, Text, Tokens
from skyrl_train.tensordict.envs.chat import ChatEnv
from skyrl_train.tensordict.history import History
from skyrl_train.tensordict.wrappers.backends import SGLangWrapper, TransformersWrapper, vLLMWrapper
from tests.support.engine_harness import TOKENIZER, TOLERANCE, EngineHarness, spelling_model
from tests.support.padded_reference import single_sequence
from tests.support.reference_sampler import Reference

WRAPPERS = {"transformers": TransformersWrapper, "vllm": vLLMWrapper, "sglang": SGLangWrapper}
CHATS = [
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
    [{"role": "user", "content": "hi"}],
]
RENDERED = [TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
IDS = [list(TOKENIZER(text)["input_ids"]) for text in RENDERED]
COUNT = 6
TRAINER_TOLERANCE = TOLERANCE / 2
"""Maximum difference from the trainer's log-probs, so that two engines differ by at most TOLERANCE."""


@pytest.fixture
def reference(bench: EngineHarness) -> Reference:
    return bench.serve(bench.random_model(0), "random")


@pytest.fixture
def wrap(bench: EngineHarness, request: pytest.FixtureRequest) -> Any:
    """A function that creates a greedy wrapper of the engine's class."""
    kind = WRAPPERS[request.node.callspec.params["started"]]

    def make(**settings: Any) -> Any:
        kwargs = {"max_new_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
        defaults = {"tokenizer": TOKENIZER, "inplace": False}
        if settings.get("generate", True):
            defaults["generate_kwargs"] = kwargs
        return kind(bench.engine, **{**defaults, **settings})

    return make


def make_input(mode: str) -> TensorDict:
    size = (len(CHATS),)
    if mode == "history":
        return TensorDict(history=ChatHistory(prompt=History.from_chats(CHATS), batch_size=size), batch_size=size)
    if mode == "text":
        return TensorDict(text=RENDERED, batch_size=size)
    return lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(ids))) for ids in IDS])


def to_lists(td: Any, *key: str) -> list[list[Any]]:
    return [row.tolist() for row in td.get(key, as_list=True)]


def trainer_logprobs(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the log-probs (nats) of all tokens but the first of each row, as an update computes them."""
    logprob_model = LogprobModel(copy.deepcopy(model).eval())
    logprobs = []
    for row in rows:
        with torch.no_grad():
            output = logprob_model(logprob_model.lay_out(single_sequence(row, 1)))
        logprobs.append(output.logprobs[1:])
    return logprobs


def assert_close(actual: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(actual), expected, atol=TRAINER_TOLERANCE, rtol=0)


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_wrapper_logprobs_match_trainer_in_every_mode(bench: EngineHarness, reference: Reference, wrap: Any, mode: str):
    """The same prompts as conversations, texts and tokens get the same responses (examples 1 to 3)."""
    wrapper = wrap(input_mode=mode)
    assert wrapper.in_keys == [(mode, "prompt")]
    out = wrapper(make_input(mode))
    assert out.batch_size == (2,)
    assert to_lists(out, "tokens", "prompt") == IDS
    responses = to_lists(out, "tokens", "response")
    assert responses == [reference.greedy(ids, COUNT) for ids in IDS]
    full = to_lists(out, "tokens", "full")
    assert full == [ids + response for ids, response in zip(IDS, responses, strict=True)]
    for row, logprobs, expected in zip(
        IDS, to_lists(out, "log_probs", "response"), trainer_logprobs(bench.model, full), strict=True
    ):
        assert_close(logprobs, expected[len(row) - 1 :])  # from the first generated token on
    assert list(out["text"].prompt) == RENDERED
    assert list(out["text"].response) == [TOKENIZER.decode(response) for response in responses]
    masks = to_lists(out, "masks", "all_assistant_mask")
    assert masks == [[False] * len(ids) + [True] * COUNT for ids in IDS]
    assert ("history" in out.keys()) == (mode == "history")  # noqa: SIM118 - a tensordict
    if mode == "history":
        last = [chat[-1] for chat in out["history"].full.to_chats()]
        assert [message["role"] for message in last] == ["assistant"] * 2
        assert [message["content"] for message in last] == list(out["text"].response)


def test_logprobs_without_generation_match_trainer(bench: EngineHarness, reference: Reference, wrap: Any):
    # Example 4 of the tutorial.
    before = bench.run(bench.engine.health()).generated_tokens
    rows = [[5, 9, 77, 30, 12, 44], [8, 250], list(range(20, 60))]
    td = lazy_stack([TensorDict(tokens=Tokens(full=torch.tensor(row))) for row in rows])
    out = wrap(input_mode="tokens", generate=False)(td)
    for actual, expected in zip(to_lists(out, "log_probs", "full"), trainer_logprobs(bench.model, rows), strict=True):
        assert actual[0] == 0
        assert_close(actual[1:], expected)
    assert to_lists(out, "tokens", "full") == rows
    chat = [*CHATS[1], {"role": "assistant", "content": "yes"}]
    td = TensorDict(history=History.from_chats([chat]), batch_size=(1,))
    out = wrap(generate=False)(td)
    (ids,), (mask,) = to_lists(out, "tokens", "full"), to_lists(out, "masks", "all_assistant_mask")
    assert TOKENIZER.decode([token for token, is_set in zip(ids, mask, strict=True) if is_set]) == "yes<|im_end|>"
    assert_close(to_lists(out, "log_probs", "full")[0][1:], trainer_logprobs(bench.model, [ids])[0])
    assert bench.run(bench.engine.health()).generated_tokens == before
    if not isinstance(wrap(), TransformersWrapper):
        with pytest.raises(NotImplementedError, match="logits"):
            wrap(generate=False).get_dist(td)


def test_wrapper_output_formats(reference: Reference, wrap: Any):
    """Padded and ragged output, several samples, and optional entries (example 5)."""
    ragged, padded = wrap()(make_input("history")), wrap(pad_output=True)(make_input("history"))
    assert set(ragged.keys()) == {"text", "masks", "tokens", "log_probs", "history"}
    width = max(map(len, IDS))
    assert padded["tokens"].prompt.shape == (2, width)
    assert padded["tokens"].full.shape == padded["log_probs"].full.shape == (2, width + COUNT)
    attention = padded["masks"].all_attention_mask
    assert [row[mask].tolist() for row, mask in zip(padded["tokens"].full, attention, strict=True)] == to_lists(
        ragged, "tokens", "full"
    )
    left = ragged.get(("tokens", "prompt"), as_padded_tensor=True, padding_side="left", padding_value=0)
    assert left.shape == (2, width)
    sampled = wrap(num_samples=2, return_text=False)(make_input("history"))
    assert sampled.batch_size == (2, 2)
    assert "text" not in sampled.keys()  # noqa: SIM118 - a tensordict
    assert sampled["tokens"].batch_size == (2, 2)


def test_wrapper_errors_name_the_problem(wrap: Any):
    # Example 6 of the tutorial.
    with pytest.raises(ValueError, match=r"'text', 'prompt'"):
        wrap(input_mode="text")(TensorDict(other=torch.zeros(1), batch_size=(1,)))
    with pytest.raises(TypeError, match="History"):
        wrap()(TensorDict(history=["hello"], batch_size=(1,)))
    with pytest.raises(ConfigError, match="speech"):
        wrap(input_mode="speech")
    with pytest.raises(ConfigError, match="no token"):
        wrap(input_mode="text")(TensorDict(text=Text(prompt=[""], batch_size=(1,)), batch_size=(1,)))
    with pytest.raises(ValueError, match="top_p"):
        wrap()(make_input("history"), top_p=2.0)


def test_a_policy_steps_an_environment(reference: Reference, wrap: Any):
    """The next prompt contains the policy's response, and the policy continues from it (example 7)."""
    env = ChatEnv(batch_size=(1,), system_prompt="be kind")
    policy = wrap(inplace=True)
    state = policy(env.reset(TensorDict(query=["hello"], batch_size=[1])))
    response = state[0]["text"].response
    following = env.step(state)["next"]
    chat = following[0]["history"].prompt.to_chats()
    assert [turn["role"] for turn in chat] == ["system", "user", "assistant"]
    assert chat[-1]["content"] == response
    again = policy(following)
    assert again[0]["history"].full.to_chats()[:3] == chat


@pytest.mark.defect("D35")
def test_updater_weights_are_sampled_from(bench: EngineHarness, reference: Reference, wrap: Any):
    trained, rows = bench.random_model(7), [[5, 9, 77, 30, 12, 44], [8, 250]]
    before = bench.run(bench.engine.health()).version
    updater = vLLMUpdater(v2=True, vllm_engine=wrap())
    try:
        updater.push_weights(trained)
    finally:
        updater.close()
        bench.model = trained  # This marks the engine's weights as unknown.
    out = wrap(input_mode="tokens", generate=False)(lazy_stack([TensorDict(tokens=torch.tensor(row)) for row in rows]))
    for actual, expected in zip(to_lists(out, "log_probs", "full"), trainer_logprobs(trained, rows), strict=True):
        assert_close(actual[1:], expected)
    assert bench.run(bench.engine.health()).version == before + 1


@pytest.mark.defect("D20")
def test_end_token_is_kept_when_padding_equals_it(bench: EngineHarness, wrap: Any):
    """The model continues a with b, and b with the end token. This test is last, because it changes the weights."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.pad_token = tokenizer.eos_token
    end, (a, b) = tokenizer.eos_token_id, TOKENIZER("ab")["input_ids"]
    bench.serve(spelling_model([a, b, end], tied=bench.tied), "ends")
    kwargs = {"max_new_tokens": COUNT, "temperature": 0.0}
    wrapper = wrap(tokenizer=tokenizer, input_mode="text", pad_output=True, generate_kwargs=kwargs)
    out = wrapper(TensorDict(text=["aba", "ab"], batch_size=(2,)))
    assert out["tokens"].response.tolist() == [[b, end], [end, end]]
    assert out["masks"].all_assistant_mask.sum(1).tolist() == [2, 1]
    logprob_wrapper = wrapper.get_new_version(generate=False, input_mode="tokens", pad_output=False)
    scored = logprob_wrapper(out)
    assert to_lists(scored, "tokens", "full") == [[a, b, a, b, end], [a, b, end]]
    sampled = out["log_probs"].full[1][out["masks"].all_assistant_mask[1]]
    assert_close(to_lists(scored, "log_probs", "full")[1][-1:], sampled)
