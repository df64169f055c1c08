from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import StepCounter, Transform

from skyrl_train.data.chat import render_prompt
from skyrl_train.errors import DataError
from skyrl_train.tensordict.containers import ChatHistory, Text, Tokens
from skyrl_train.tensordict.envs.chat import ChatEnv, DatasetChatEnv
from skyrl_train.tensordict.envs.conversation import history_of, messages_of
from skyrl_train.tensordict.history import History
from skyrl_train.testing.tiny_models import byte_tokenizer

QUESTIONS = ["Where is Rome?", "Why?"]


def answering(*texts: str) -> Any:
    """A policy that fills in the history of every row with these texts, in turn."""

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        for row, text in zip(tensordict.unbind(0), texts, strict=True):
            prompt = messages_of(row["history"].prompt)
            row["history"].full = history_of([*prompt, {"role": "assistant", "content": text}])
        return tensordict

    return policy


def prompts(root: TensorDictBase) -> list[list[tuple[str, str]]]:
    rows = [messages_of(row["history"].prompt) for row in root.unbind(0)]
    return [[(message["role"], message["content"]) for message in messages] for messages in rows]


@pytest.mark.parametrize("key", ["query", "text"])
def test_a_question_under_either_key_of_the_documentation_opens_a_conversation(key: str):
    env = ChatEnv(system_prompt="Be brief.", batch_size=(2,))
    root = env.reset(TensorDict({key: QUESTIONS}, batch_size=[2]))
    assert prompts(root) == [[("system", "Be brief."), ("user", question)] for question in QUESTIONS]
    assert root["query"] == QUESTIONS
    assert root["done"].shape == (2, 1) and not root["done"].any()


def test_what_was_said_is_the_next_prompt_also_where_rows_have_different_lengths():
    env = ChatEnv(batch_size=(2,)).append_transform(StepCounter(3))
    root = env.reset(TensorDict(query=QUESTIONS, batch_size=[2]))
    _, root = env.step_and_maybe_reset(answering("Italy.", "Because.")(root))
    assert prompts(root)[0] == [("user", QUESTIONS[0]), ("assistant", "Italy.")]
    done = torch.tensor([[True], [False]])
    part = env.reset(root.set("_reset", done))
    assert [len(row) for row in prompts(part)] == [1, 2]
    assert part["step_count"].tolist() == [[0], [1]]
    stepped, root = env.step_and_maybe_reset(answering("a", "b")(part))
    assert [len(row) for row in prompts(stepped["next"])] == [2, 3]
    assert root["query"] == QUESTIONS


def test_the_old_style_of_actions_is_a_string():
    env = ChatEnv()
    root = env.reset(TensorDict(text=["Hello"], batch_size=[1]))
    root["text_response"] = ["Hi."]
    stepped = env.step(root)
    assert prompts(stepped["next"]) == [[("user", "Hello"), ("assistant", "Hi.")]]
    assert "text_response" not in set(stepped["next"].keys())


def test_a_response_alone_is_an_action_too():
    env = ChatEnv()
    root = env.reset(TensorDict(query=["Hello"], batch_size=[1]))
    root[0]["history"].response = history_of([{"role": "assistant", "content": "Hi."}])
    assert prompts(env.step(root)["next"]) == [[("user", "Hello"), ("assistant", "Hi.")]]


def test_text_mode_renders_the_template_and_goes_on_with_the_full_text():
    tokenizer = byte_tokenizer()
    env = ChatEnv(input_mode="text", tokenizer=tokenizer, batch_size=(2,))
    root = env.reset(TensorDict(query=QUESTIONS, batch_size=[2]))
    wanted: list[Any] = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in QUESTIONS
    ]
    assert list(root["text"].prompt) == wanted
    root["text_response"] = ["Italy.", "Because."]
    assert list(env.step(root)["next", "text"].prompt) == [wanted[0] + "Italy.", wanted[1] + "Because."]


def test_tokens_mode_keeps_ragged_ids_and_no_padding_of_the_policy():
    tokenizer = byte_tokenizer()
    env = ChatEnv(input_mode="tokens", tokenizer=tokenizer, batch_size=(2,))
    root = env.reset(TensorDict(query=QUESTIONS, batch_size=[2]))
    ids = [row["tokens"].prompt.tolist() for row in root.unbind(0)]
    assert ids == [render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS]
    masks = []
    for row in root.unbind(0):
        row["tokens"].full = torch.cat([torch.tensor([0, 0]), row["tokens"].prompt, torch.tensor([7, 0])])
        masks.append(TensorDict(all_attention_mask=torch.ones(len(row["tokens"].full), dtype=torch.bool)))
        masks[-1]["all_attention_mask"][[0, 1, -1]] = False
    root.set("masks", lazy_stack(masks))
    following = env.step(root)["next"]
    assert [row["tokens"].prompt.tolist() for row in following.unbind(0)] == [[*row, 7] for row in ids]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"batch_size": ()}, ValueError),
        ({"input_mode": "json"}, ValueError),
        ({"with_tokenizer": True}, ValueError),
        ({"input_mode": "tokens"}, ValueError),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], error: type[Exception]):
    with pytest.raises(error):
        ChatEnv(**settings)


def test_resets_without_a_question_and_steps_without_an_action_say_what_is_missing():
    env = ChatEnv()
    with pytest.raises(RuntimeError, match="query"):
        env.reset()
    with pytest.raises(RuntimeError, match=r"'answer'.*data_key"):
        env.reset(TensorDict(answer=["1"], batch_size=[1]))
    root = env.reset(TensorDict(query=["Hello"], batch_size=[1]))
    with pytest.raises(ValueError, match=r"history.*full"):
        env.step(root)
    with pytest.raises(RuntimeError, match="batch_size"):
        ChatEnv(batch_size=(2,)).reset(TensorDict(query=["Hello"], batch_size=[1]))


def test_a_rollout_stops_with_the_first_row_that_is_done_or_goes_on_with_new_episodes():
    rows = [{"query": str(number)} for number in range(8)]
    env = DatasetChatEnv(dataset=rows, shuffle=False, num_envs=2).append_transform(StepCounter(2))
    policy = answering("a", "b")
    assert env.rollout(10, policy).batch_size == (2, 2)
    long = env.rollout(5, policy, break_when_any_done=False)
    assert long.batch_size == (2, 5)
    assert [step["query"] for step in long.unbind(1)] == [["2", "3"]] * 2 + [["4", "5"]] * 2 + [["6", "7"]]
    assert long["next", "done"][0, :, 0].tolist() == [False, True, False, True, False]


def test_rows_of_a_dataset_come_in_groups_without_end_and_can_begin_again():
    rows = [{"text": f"q{number}", "answer": number} for number in range(3)]
    env = DatasetChatEnv(dataset=rows, shuffle=False, num_envs=2, repeats=2)
    seen = [env.reset()["query"] for _ in range(4)]
    assert seen == [["q0", "q0"], ["q1", "q1"], ["q2", "q2"], ["q0", "q0"]]
    env.reset_dataloader()
    root = env.reset()
    assert root["query"] == ["q0", "q0"] and list(root["answer"]) == [0, 0]


def test_shuffled_rows_are_all_seen_once_a_pass_and_repeatable_by_seed():
    rows = [{"query": str(number)} for number in range(20)]

    def seen(seed: int) -> list[str]:
        env = DatasetChatEnv(dataset=rows, seed=seed, num_envs=4, batch_size_dl=3)
        return [text for _ in range(10) for text in env.reset()["query"]]

    first = seen(0)
    assert first == seen(0) != seen(1)
    assert sorted(first[:20], key=int) == [row["query"] for row in rows] == sorted(first[20:], key=int)
    assert first[:20] != first[20:]


def test_a_dataloader_of_batches_feeds_an_environment():
    loader = [{"text": ["a", "b"], "id": torch.tensor([1, 2])}]
    env = DatasetChatEnv.from_dataloader(loader, num_envs=3, system_prompt="s")
    root = env.reset()
    assert root["query"] == ["a", "b", "a"] and root["id"].tolist() == [1, 2, 1]


@pytest.mark.defect("D29")
def test_the_tokens_of_the_next_prompt_have_what_tools_said_and_the_header_of_the_answer():
    tokenizer = byte_tokenizer()
    env = ChatEnv(tokenizer=tokenizer, with_tokenizer=True).append_transform(_Tool())
    root = env.reset(TensorDict(query=["2 + 2?"], batch_size=[1]))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for turn, answer in enumerate(("call", "four")):
        row = root[0]
        asked = messages_of(row["history"].prompt)
        assert row["tokens"].prompt.tolist() == render_prompt(tokenizer, asked), turn
        said = [*row["tokens"].prompt.tolist(), *tokenizer.encode(answer), end]
        root.set("tokens", lazy_stack([Tokens(prompt=row["tokens"].prompt, full=torch.tensor(said), batch_size=[])]))
        root = env.step(answering(answer)(root))["next"]
        assert root[0]["tokens"].prompt[: len(said)].tolist() == said
    messages = messages_of(root[0]["history"].prompt)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert root[0]["tokens"].prompt.tolist() == render_prompt(tokenizer, messages)


def test_tokens_that_were_sampled_are_not_tokenised_again():
    tokenizer = byte_tokenizer()
    env = ChatEnv(tokenizer=tokenizer, with_tokenizer=True)
    root = env.reset(TensorDict(query=["?"], batch_size=[1]))
    said = [*root[0]["tokens"].prompt.tolist(), 200, 201, 202]  # bytes that are no text
    root.set("tokens", lazy_stack([Tokens(full=torch.tensor(said), batch_size=[])]))
    following = env.step(answering("\ufffd")(root))["next"]
    ids = following[0]["tokens"].prompt.tolist()
    assert ids[: len(said)] == said and ids[len(said)] == tokenizer.convert_tokens_to_ids("<|im_end|>")


class _Tool(Transform):
    """Says something behind every answer."""

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for row in next_tensordict.unbind(0):
            said = [*messages_of(row["history"].prompt), {"role": "tool", "content": "4"}]
            row.set("history", ChatHistory(prompt=history_of(said), batch_size=[]))
        return next_tensordict


def test_containers_are_those_of_the_policies():
    root = ChatEnv().reset(TensorDict(query=["Hello"], batch_size=[1]))
    assert isinstance(root.get("history"), ChatHistory)
    root = ChatEnv(input_mode="text").reset(TensorDict(query=["Hello"], batch_size=[1]))
    assert isinstance(root.get("text"), Text)
    assert not isinstance(root.get("query"), NonTensorData) or root["query"] == ["Hello"]


OPENING = [{"role": "assistant", "content": "What do you need?"}, {"role": "user", "content": "Rome"}]


@pytest.mark.defect("query-must-be-text")
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_a_question_may_be_a_conversation_that_goes_on(mode: str):
    tokenizer = byte_tokenizer()
    wanted = [{"role": "system", "content": "Be brief."}, *OPENING]
    env = ChatEnv(input_mode=mode, system_prompt="Be brief.", tokenizer=tokenizer, batch_size=(1,))
    history = TensorDict(query=History.from_chats([OPENING]), batch_size=[1])
    for given in (history, TensorDict(query=[OPENING], batch_size=[1])):
        root = env.reset(given)
        prompt = root[0][mode].prompt
        if mode == "history":
            assert messages_of(prompt) == wanted
        elif mode == "text":
            assert prompt == tokenizer.apply_chat_template(wanted, tokenize=False, add_generation_prompt=True)
        else:
            assert prompt.tolist() == render_prompt(tokenizer, wanted)


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_a_question_that_ends_with_the_policy_is_continued(mode: str):
    tokenizer = byte_tokenizer()
    asked = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "The answer"}]
    env = ChatEnv(input_mode=mode, tokenizer=tokenizer, batch_size=(1,))
    root = env.reset(TensorDict(query=[asked], batch_size=[1]))
    prompt = root[0][mode].prompt
    if mode != "history":
        text = prompt if mode == "text" else tokenizer.decode(prompt)
        assert text == tokenizer.apply_chat_template(asked, tokenize=False, continue_final_message=True)
        return
    assert messages_of(prompt)[-1]["is_complete"] is False
    response = history_of([asked[-1] | {"content": " is 4"}])
    root.set("history", lazy_stack([ChatHistory(prompt=prompt, response=response)]))
    following = env.step(root)["next"]
    assert prompts(following) == [[("user", "2 + 2?"), ("assistant", "The answer is 4")]]


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_messages_that_the_template_drops_are_refused(mode: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace("in messages", "in messages if m.role != 'system'")
    tokenizer.chat_template = tokenizer.chat_template.replace("for message", "for m").replace("message[", "m[")
    env = ChatEnv(input_mode=mode, system_prompt="Be brief.", tokenizer=tokenizer, batch_size=(1,))
    with pytest.raises(DataError, match=r"messages\[0\]\.content: the chat template does not write 'Be brief\.'"):
        env.reset(TensorDict(query=["2 + 2?"], batch_size=[1]))


@pytest.mark.defect("query-must-be-text")
def test_conversations_of_different_lengths_are_questions_of_a_batch_and_of_a_dataset():
    chats = [OPENING, OPENING[1:]]
    root = ChatEnv(batch_size=(2,)).reset(TensorDict(query=History.from_chats(chats), batch_size=[2]))
    assert [len(row) for row in prompts(root)] == [2, 1]
    rows = [{"messages": chat} for chat in chats]
    env = DatasetChatEnv(dataset=rows, shuffle=False, data_key="messages", num_envs=2).append_transform(StepCounter(2))
    played = env.rollout(4, answering("a", "b"), break_when_any_done=False)
    assert [len(row) for row in prompts(played[:, 3])] == [3, 2]
    with pytest.raises(RuntimeError, match="a History or messages"):
        ChatEnv().reset(TensorDict(query=[[{"content": "no role"}]], batch_size=[1]))


@pytest.mark.defect("chat-env-constructors-missing")
def test_environments_are_made_from_a_loader_or_with_a_tokenizer_as_in_torchrl():
    loader = [{"text": ["a", "b"]}]
    env = ChatEnv.from_dataloader(loader, batch_size=(2,), repeats=2, group_repeats=True, system_prompt="s")
    assert isinstance(env, DatasetChatEnv) and env.reset()["query"] == ["a", "a"]
    with pytest.raises(ValueError, match="num_envs=2, batch_size"):
        ChatEnv.from_dataloader(loader, num_envs=2, batch_size=2)
    with pytest.raises(ValueError, match="one dimension"):
        ChatEnv.from_dataloader(loader, batch_size=())
    tokenizer = byte_tokenizer()
    kept = ChatEnv.with_tokenizer(tokenizer, system_prompt="s")
    root = kept.reset(TensorDict(query=["a"], batch_size=[1]))
    assert root[0]["tokens"].prompt.tolist() == render_prompt(tokenizer, messages_of(root[0]["history"].prompt))


class Brief(DatasetChatEnv):
    SYSTEM_PROMPT = "Be brief."


@pytest.mark.defect("chat-env-constructors-missing")
def test_a_class_of_ones_own_may_have_its_system_prompt():
    rows = [{"query": "a"}]
    for made, wanted in ((Brief(dataset=rows), 2), (Brief(dataset=rows, system_prompt=""), 1)):
        assert len(prompts(made.reset())[0]) == wanted
    assert prompts(Brief.from_dataloader([rows]).reset())[0][0] == ("system", "Be brief.")
