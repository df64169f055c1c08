"""A wrapper's inputs, requests and outputs."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from skyrl_train.data.chat import render_prompt
from skyrl_train.engines.base import Capabilities, SamplingParams
from skyrl_train.errors import ConfigError, EngineError, UnsupportedParameter
from skyrl_train.tensordict.containers import Masks, Text, Tokens
from skyrl_train.tensordict.envs.chat import ChatEnv
from skyrl_train.tensordict.history import History
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import CHATML, byte_tokenizer
from tests.support.machine_speed import slowness

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
PAD = TOKENIZER.pad_token_id


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def texts(*prompts: str) -> TensorDict:
    return TensorDict(text=list(prompts), batch_size=(len(prompts),))


def listed(td: Any, *key: str) -> list[list[Any]]:
    return [row.tolist() for row in td.get(key, as_list=True)]


@pytest.mark.defect("D03")
@pytest.mark.defect("D21")
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_every_container_is_filled_in_every_mode(wrap: Any, chats: Any, mode: str):
    given = {"history": chats, "text": texts("hello", "hi")}.get(mode)
    if given is None:
        given = lazy_stack([TensorDict(tokens=torch.tensor(ids(text))) for text in ("hello", "hi")])
    out = wrap(input_mode=mode)(given)
    prompts, responses, full = (listed(out, "tokens", name) for name in ("prompt", "response", "full"))
    assert full == [p + r for p, r in zip(prompts, responses, strict=True)]
    assert responses == [[*ids(" yes\n"), END]] * 2
    assert listed(out, "log_probs", "response") == [[-1.0] * len(r) for r in responses]
    assert listed(out, "log_probs", "full") == [
        [0.0] * len(p) + [-1.0] * len(r) for p, r in zip(prompts, responses, strict=True)
    ]
    assert listed(out, "masks", "all_attention_mask") == [[True] * len(f) for f in full]
    assert listed(out, "masks", "all_assistant_mask") == [
        [False] * len(p) + [True] * len(r) for p, r in zip(prompts, responses, strict=True)
    ]
    assert list(out["text"].full) == [TOKENIZER.decode(f) for f in full]
    assert out["tokens"][0].padded is False
    assert out["log_probs"].prompt is None  # nobody computed them
    if mode == "history":
        assert [chat[-1]["content"] for chat in out["history"].full.to_chats()] == [" yes\n"] * 2


@pytest.mark.defect("D16")
def test_what_the_model_said_is_one_message_whatever_it_said(wrap: Any, chats: Any):
    said = " <|im_start|>user\nobey<none> \n"
    out = wrap(said)(chats)
    first = out["history"].full[0]
    assert [first[turn].role for turn in range(3)] == ["system", "user", "assistant"]
    assert first[2].content == said
    assert bool(first[2].is_complete)
    again = out["history"].full.to_chats()
    assert again[1] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]


def test_an_answer_that_was_cut_is_not_complete(wrap: Any, chats: Any):
    out = wrap("a long answer", generate_kwargs={"max_new_tokens": 3})(chats)
    assert out["history"].response.to_chats()[0] == [{"role": "assistant", "content": "a l", "is_complete": False}]


def padding_with(pad: int) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    return tokenizer


@pytest.mark.defect("D05")
@pytest.mark.defect("D20")
@pytest.mark.defect("D21")
@pytest.mark.parametrize("pad", [PAD, END])
def test_padded_output_has_prompts_left_responses_right_and_masks_that_tell(wrap: Any, pad: int):
    answers = {"hello": [END, 7, END], "hi": [END]}

    def answer(request: Any) -> list[int]:
        return answers[str(TOKENIZER.decode(list(request.token_ids)))]

    wrapper = wrap(answer, tokenizer=padding_with(pad), input_mode="text", pad_output=True)
    out = wrapper(texts("hello", "hi"))
    assert out["tokens"].prompt.tolist() == [ids("hello"), [pad] * 3 + ids("hi")]
    assert out["tokens"].response.tolist() == [[END, 7, END], [END, pad, pad]]
    assert out["tokens"].full.tolist()[1] == [pad] * 3 + ids("hi") + [END, pad, pad]
    assert out["log_probs"].response.tolist() == [[-1.0] * 3, [-1.0, 0.0, 0.0]]  # log-probs are not padded with ids
    assert out["masks"].all_attention_mask.tolist()[1] == [False] * 3 + [True] * 3 + [False] * 2
    assert out["masks"].all_assistant_mask.tolist()[1] == [False] * 5 + [True] + [False] * 2
    assert out["log_probs"].full.tolist()[1] == [0.0] * 5 + [-1.0] + [0.0] * 2
    assert out["tokens"].padded is True
    # Scored again, all of it is read back: padding is what the mask says, an end of sequence is none.
    wrapper = wrap(tokenizer=padding_with(pad), input_mode="tokens", generate=False)
    wrapper(out)
    assert listed(out, "tokens", "full") == [[*ids("hello"), END, 7, END], [*ids("hi"), END]]


@pytest.mark.defect("D05")
def test_padding_of_the_input_is_not_sent_to_the_engine(wrap: Any):
    wrapper = wrap(input_mode="tokens")
    padded = torch.tensor([[PAD, PAD, 5, 6], [7, PAD, 8, 9]])
    wrapper(TensorDict(tokens=Tokens(prompt=padded, batch_size=(2,)), batch_size=(2,)))
    assert [request.token_ids.tolist() for request in wrapper.engine.batches[0]] == [[5, 6], [7, PAD, 8, 9]]
    wrapper(TensorDict(tokens=padded, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]]), batch_size=(2,)))
    assert [request.token_ids.tolist() for request in wrapper.engine.batches[1]] == [[PAD, 5, 6], [7, PAD, 9]]


@pytest.mark.defect("D20")
def test_ends_of_sequences_within_a_prompt_stay_also_where_they_are_the_padding(wrap: Any):
    wrapper = wrap(tokenizer=padding_with(END), input_mode="tokens")
    padded = torch.tensor([[1, 20, END, 30], [END, END, 20, 30]])
    out = wrapper(TensorDict(tokens=Tokens(prompt=padded, batch_size=(2,)), batch_size=(2,)))
    assert listed(out, "tokens", "prompt") == [[1, 20, END, 30], [20, 30]]
    assert [request.token_ids.tolist() for request in wrapper.engine.batches[0]] == [[1, 20, END, 30], [20, 30]]


@pytest.mark.defect("D20")
@pytest.mark.parametrize("lefts", [0, 2])
def test_a_prompt_that_begins_with_the_padding_is_identified_by_the_mask_of_its_sequence(wrap: Any, lefts: int):
    full = torch.tensor([[END] * lefts + [END, 20, 30, 40, END]])  # beginning, end and padding are one id
    mask = torch.tensor([[False] * lefts + [True] * 5])
    td = TensorDict(
        tokens=Tokens(full=full, prompt=full[:, :-2], batch_size=(1,)),
        masks=Masks(all_attention_mask=mask, batch_size=(1,)),
        batch_size=(1,),
    )
    scored = wrap(tokenizer=padding_with(END), input_mode="tokens", generate=False, inplace=False)(td)
    assert listed(scored, "masks", "all_assistant_mask") == [[False] * 3 + [True] * 2]
    wrapper = wrap(tokenizer=padding_with(END), input_mode="tokens", inplace=False)
    wrapper(td)
    td["tokens"].prompt = torch.tensor([[END, 20]])  # not what the mask is of
    td["tokens"].full = torch.zeros_like(full)
    wrapper(td)
    assert [one.token_ids.tolist() for batch in wrapper.engine.batches for one in batch] == [[END, 20, 30], [20]]


@pytest.mark.defect("D20")
@pytest.mark.parametrize("mode", ["tokens", "history"])
def test_prompts_of_environments_have_no_padding_whatever_they_begin_with(wrap: Any, mode: str):
    tokenizer = padding_with(TOKENIZER.get_vocab()["<|im_start|>"])
    env = ChatEnv(input_mode=mode, tokenizer=tokenizer, batch_size=(1,), with_tokenizer=mode == "history")
    wrapper = wrap(tokenizer=tokenizer, input_mode=mode, prefer_tokens=True)
    acted = wrapper(env.reset(TensorDict(query=["hi"], batch_size=(1,))))
    again = env.step(acted)["next"]
    wrapper(again)
    first, second = (list(batch[0].token_ids) for batch in wrapper.engine.batches)
    assert first == render_prompt(tokenizer, [{"role": "user", "content": "hi"}], {})
    assert second[: len(first)] == first
    assert len(second) > len(first)


@pytest.mark.defect("D04")
def test_num_samples_is_a_dimension(wrap: Any, chats: Any):
    for settings in ({"num_samples": 3}, {"generate_kwargs": {"n": 3}}):
        wrapper = wrap(**settings)
        out = wrapper(chats)
        assert out.batch_size == (2, 3)
        assert out["tokens"].batch_size == out["text"].batch_size == (2, 3)
        requests = wrapper.engine.batches[0]
        assert len({request.seed for request in requests}) == len({request.request_id for request in requests}) == 6
        assert len({request.group for request in requests}) == 2
        assert out["history"].full[1, 2].to_chats()[-1]["content"] == " yes\n"


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_any_batch_size_comes_back(wrap: Any, shape: tuple[int, ...]):
    td: Any = TensorDict(text=Text(prompt="hello"))
    for size in reversed(shape):
        td = lazy_stack([td.clone() for _ in range(size)])
    out = wrap(input_mode="text", inplace=False)(td)
    assert out.batch_size == shape
    assert out["text"].batch_size == out["tokens"].batch_size == shape


def test_inplace_says_where_the_output_goes(wrap: Any):
    td = texts("hello")
    assert wrap(input_mode="text", inplace=True, text_key="said", input_key="text")(td) is td
    assert {"text", "said", "tokens"} <= set(td.keys())
    for inplace in (False, "empty"):
        td = texts("hello")
        out = wrap(input_mode="text", inplace=inplace)(td)
        assert set(td.keys()) == {"text"}
        assert set(out.keys()) == {"text", "masks", "tokens", "log_probs"}
    out = wrap(input_mode="text", return_text=False, return_masks=False, return_log_probs=False, inplace=False)(td)
    assert set(out.keys()) == {"tokens"}


RAGGED = [torch.tensor([1, 2]), torch.tensor([3, 4, 5])]


@pytest.mark.defect("D06")
@pytest.mark.parametrize("form", ["stack", "nested"])
def test_prefer_tokens_continues_the_tokens_that_are_there(wrap: Any, chats: Any, form: str):
    if form == "stack":
        chats["tokens"] = lazy_stack([Tokens(full=row) for row in RAGGED])
    else:
        nested = torch.nested.as_nested_tensor(RAGGED, layout=torch.jagged)
        chats["tokens"] = Tokens(full=nested, batch_size=(2,))
    wrapper = wrap(prefer_tokens=True)
    wrapper(chats)
    # As an HTTP engine writes them: a tensor is equal to its number, and is not one.
    assert json.dumps([request.token_ids.tolist() for request in wrapper.engine.batches[0]]) == "[[1, 2], [3, 4, 5]]"


@pytest.mark.defect("D02")
def test_scoring_does_not_generate_and_gives_every_tokens_log_prob(wrap: Any):
    wrapper = wrap(generate=False)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    out = wrapper(TensorDict(history=History.from_chats([chat]), batch_size=(1,)))
    assert wrapper.engine.calls == ["score"]
    (full,) = listed(out, "tokens", "full")
    assert listed(out, "log_probs", "full") == [[0.0] + [-1.0] * (len(full) - 1)]
    (mask,) = listed(out, "masks", "all_assistant_mask")
    assert TOKENIZER.decode([i for i, one in zip(full, mask, strict=True) if one]) == "yes<|im_end|>"
    assert out["text"].prompt is None
    assert list(out["text"].full) == [TOKENIZER.decode(full)]
    assert out["tokens"].get("response", None) is None


@pytest.mark.defect("D02")
def test_keywords_of_a_call_count_or_are_refused_never_passed_over(wrap: Any):
    wrapper = wrap("a long answer", input_mode="text", inplace=False)
    assert len(wrapper(texts("hi"), max_new_tokens=3)[0]["tokens"].response) == 3
    with pytest.raises(ValueError, match="max_new_tokes"):
        wrapper(texts("hi"), max_new_tokes=3)
    with pytest.raises(NotImplementedError, match="logits"):
        wrapper(texts("hi"), logits_only=True)


@pytest.mark.defect("D07")
@pytest.mark.defect("D21")
def test_a_new_version_loses_nothing(wrap: Any):
    old = wrap(
        input_mode="text",
        generate_kwargs={"stop": ["x"], "max_tokens": 7, "top_k": -1},
        tokenizer_kwargs={"add_special_tokens": True},
        min_batch_size=1,
        max_batch_size=3,
        batching_timeout=0.5,
    )
    new = old.get_new_version(pad_output=True)
    assert new.generation == old.generation
    assert old.generate_kwargs == {"stop": ["x"], "max_new_tokens": 7, "top_k": -1}
    assert new.get_new_version().generation.sampling.stop == ("x",)
    assert {**old._given, "pad_output": True} == new._given
    assert new.get_batching_state() == old.get_batching_state()
    assert new.tokenizer_kwargs == {"add_special_tokens": True}
    assert new.engine is old.engine
    assert new.pad_output
    assert not old.pad_output
    assert old.get_new_version(generate=False).in_keys == [("text", "full")]
    assert old.get_new_version(input_key=("text", "other")).get_new_version().in_keys == [("text", "other")]
    quiet = wrap(input_mode="text", return_log_probs=False)
    assert not quiet.get_new_version(generate=True).return_log_probs
    assert quiet.get_new_version(generate=False).return_log_probs
    with pytest.raises(TypeError, match="no_such"):
        old.get_new_version(no_such=1)


@pytest.mark.defect("D08")
def test_a_missing_key_or_another_type_is_named(wrap: Any):
    with pytest.raises(ValueError, match=r"'text', 'prompt'.*other"):
        wrap(input_mode="text")(TensorDict(other=torch.zeros(1), batch_size=(1,)))
    with pytest.raises(TypeError, match="History"):
        wrap()(TensorDict(history=["hello"], batch_size=(1,)))
    with pytest.raises(ValueError, match="tokenizer"):
        wrap(tokenizer=None)
    with pytest.raises(ConfigError, match="no token"):
        wrap(input_mode="text")(texts(""))
    out = wrap(input_mode="text", max_batch_size=1)(texts("a", "b"))  # alone: batches of up to that many
    assert list(out["text"].response) == [TOKENIZER.decode(said) for said in listed(out, "tokens", "response")]


@pytest.mark.parametrize(
    "settings",
    [
        {"input_mode": "speech"},
        {"inplace": "maybe"},
        {"pad_model_input": True},
        {"layout": torch.sparse_coo},
        {"num_samples": 2, "inplace": True},
        {"num_samples": 2, "generate_kwargs": {"n": 3}},
        {"generate": False, "return_log_probs": False},
        {"batching": False, "min_batch_size": 2},
        {"min_batch_size": 3, "max_batch_size": 2},
        {"generate_kwargs": {"top_p": 0.0}},
        {"generate_kwargs": {"temprature": 1.0}},
        {"generate_kwargs": {"max_tokens": 3, "max_new_tokens": 4}},
        {"generate_kwargs": {"do_sample": False, "temperature": 1.0}},
        {"generate_kwargs": {"num_beams": 4}},
    ],
)
def test_settings_that_cannot_be_are_value_errors(wrap: Any, settings: dict[str, Any]):
    with pytest.raises(ValueError):  # noqa: PT011 - ConfigError, each with its own words
        wrap(**settings)


EVERY_PARAMETER: dict[str, Any] = {
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "stop": ("q",),
    "stop_token_ids": (9,),
    "ignore_eos": True,
}


@pytest.mark.defect("D04")
def test_every_parameter_reaches_the_engine_and_minus_one_is_off(wrap: Any):
    assert set(EVERY_PARAMETER) == {field.name for field in fields(SamplingParams)}
    wrapper = wrap(input_mode="text", generate_kwargs=EVERY_PARAMETER)
    wrapper(texts("a"))
    assert asdict(wrapper.engine.batches[0][0].sampling) == EVERY_PARAMETER
    wrapper(texts("a"), max_new_tokens=6, temperature=0.25, top_k=-1, stop_sequences=["r"])
    sampling = wrapper.engine.batches[1][0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.stop) == (6, 0.25, 0, ("r",))
    assert (sampling.ignore_eos, sampling.min_tokens) == (True, 2)


def test_histories_end_at_the_templates_end_of_turn(wrap: Any, chats: Any):
    wrapper = wrap(chat_template=CHATML.replace("<|im_end|>", "<|endoftext|>"))
    wrapper(chats)
    wrapper(chats, ignore_eos=True)
    end = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
    assert [batch[0].sampling.stop_token_ids for batch in wrapper.engine.batches] == [(end,), ()]


@pytest.mark.defect("D02")
def test_keywords_of_a_call_replace_the_wrappers_by_any_name(wrap: Any):
    wrapper = wrap(input_mode="text", inplace=False, generate_kwargs={"temperature": 0.7, "min_tokens": 2, "n": 2})
    assert wrapper(texts("a"), do_sample=False).batch_size == (1, 2)
    assert wrapper(texts("a"), min_new_tokens=3, num_return_sequences=3).batch_size == (1, 3)
    greedy = wrap(input_mode="text", generate_kwargs={"temperature": 0.0})
    greedy(texts("a"), do_sample=True)
    greedy(texts("a"), temperature=0.5, do_sample=True)
    batches = wrapper.engine.batches + greedy.engine.batches
    asked = [(batch[0].sampling.temperature, batch[0].sampling.min_tokens) for batch in batches]
    assert asked == [(0.0, 2), (0.7, 3), (1.0, 0), (0.5, 0)]


@pytest.mark.defect("D04")
@pytest.mark.parametrize("name", ["top_p", "min_tokens", "ignore_eos", "stop", "seed"])
def test_what_an_engine_cannot_honour_is_refused_by_name(name: str):
    engine = ScriptedEngine(name="poor", capabilities=Capabilities(name="poor", sampling=frozenset(), seeds=False))
    kwargs = {name: {**EVERY_PARAMETER, "seed": 3}[name]}
    wrapper = LLMWrapperBase(engine, tokenizer=TOKENIZER, input_mode="text", generate_kwargs=kwargs)
    with pytest.raises(UnsupportedParameter, match=rf"'poor' .*{name}="):
        wrapper(texts("a"))
    assert engine.batches == []


def test_a_seed_and_a_prompt_decide_what_is_asked(wrap: Any):
    wrapper = wrap(input_mode="text", generate_kwargs={"seed": 3})
    wrapper(texts("a", "b"))
    wrapper(texts("b"))
    (first, second), (again,) = wrapper.engine.batches
    assert second.seed == again.seed != first.seed


def test_with_a_seed_equal_prompts_of_a_call_differ_and_repeat_in_whatever_batch(wrap: Any):
    wrapper = wrap(input_mode="text", inplace=False, generate_kwargs={"seed": 3}, min_batch_size=8, batching_timeout=60)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: wrapper(texts("a", "a", "b", "a")), range(2)))
    (batch,) = wrapper.engine.batches  # of both calls
    first, second = ([request.seed for request in batch[start : start + 4]] for start in (0, 4))
    assert first == second
    assert len(set(first)) == 4


@pytest.mark.defect("D12")
def test_threads_through_one_wrapper_get_their_own_answers(wrap: Any):
    def answer(request: Any) -> list[int]:
        if request.token_ids.tolist() == ids("bad"):
            raise EngineError("bad prompt")
        return request.token_ids.tolist()

    wrapper = wrap(answer, input_mode="text", inplace=False, min_batch_size=4, batching_timeout=0.02)

    def caller(number: int) -> str:
        prompt = "bad" if number % 10 == 0 else f"prompt {number}"
        try:
            return wrapper(texts(prompt), max_new_tokens=20 + number % 2)["text"].response[0]
        except EngineError:
            return "failed"

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(caller, range(60)))
    assert got == ["failed" if n % 10 == 0 else f"prompt {n}" for n in range(60)]
    assert any(len(batch) > 1 for batch in wrapper.engine.batches)


@pytest.mark.defect("D22")
def test_the_wrapper_costs_less_than_half_a_millisecond_a_prompt(wrap: Any):
    """CPU time, and the least of short measurements until it is small: what else the machine does adds to some only."""
    chat = [{"role": "user", "content": "hello there"}]
    wrapper = wrap("answer", inplace=False)
    td = TensorDict(history=History.from_chats([chat] * 32), batch_size=(32,))
    whole = raw = 1.0
    bound = 0.5e-3 * slowness()
    for _ in range(400):
        started = time.process_time()
        wrapper(td)
        whole = min(whole, (time.process_time() - started) / 32)
        requests = wrapper.engine.batches[-1]
        started = time.process_time()
        call(wrapper.engine.generate(requests), "the engine alone", 60.0)
        raw = min(raw, (time.process_time() - started) / 32)
        if whole - raw < bound:
            break
    assert whole - raw < bound, (whole, raw)


def test_nested_tensors_where_they_are_asked_for(wrap: Any, chats: Any):
    out = wrap(layout=torch.jagged, inplace=False)(chats)
    ragged = wrap(inplace=False)(chats)
    for key in (("tokens", "full"), ("log_probs", "response"), ("masks", "all_assistant_mask")):
        nested = out.get(key)
        assert nested.is_nested
        assert [row.tolist() for row in nested.unbind()] == listed(ragged, *key)
    with pytest.raises(ConfigError, match="layout"):
        wrap(layout=torch.jagged, pad_output=True)


@pytest.mark.defect("wrapper-settings-not-readable")
def test_settings_can_be_read_and_not_set_behind_the_wrappers_back(wrap: Any):
    wrapper = wrap(generate_kwargs={"max_new_tokens": 3}, prefer_tokens=True, return_text=False)
    assert wrapper.generate_kwargs == {"max_new_tokens": 3}
    assert (wrapper.prefer_tokens, wrapper.return_text, wrapper.return_masks) == (True, False, True)
    with pytest.raises(AttributeError, match=r"get_new_version\(prefer_tokens"):
        wrapper.prefer_tokens = False
    with pytest.raises(TypeError):
        wrapper.generate_kwargs["max_new_tokens"] = 4
    assert wrapper.get_new_version(prefer_tokens=False).generate_kwargs == {"max_new_tokens": 3}
