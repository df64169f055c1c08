"""Transforms between text, tokens and conversations, and the version of the policy, in TorchRL's ChatEnv."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import Compose, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv

from skyrl_train.data.chat import render_prompt
from skyrl_train.tensordict import (
    IncrementalTokenizer,
    Masks,
    PolicyVersion,
    SimpleToolTransform,
    TemplateTransform,
    Tokenizer,
    Tokens,
)
from skyrl_train.testing.tiny_models import byte_tokenizer
from tests.support.chat_answers import answered, chats

TOKENIZER = byte_tokenizer()


def begun(*transforms: Transform, rows: int = 1) -> tuple[TransformedEnv, TensorDictBase]:
    """An environment with transforms, and its first observations."""
    env = TransformedEnv(ChatEnv(batch_size=(rows,)), Compose(*transforms))
    return env, env.reset(TensorDict(query=["?"] * rows, batch_size=[rows]))


@pytest.mark.defect("D32")
@pytest.mark.parametrize("kind", ["int", "uuid"])
def test_version_of_a_step_is_the_one_that_acted(kind: str):
    version = PolicyVersion(kind)
    env, root = begun(version, rows=2)
    seen: list[Any] = []
    expected: list[Any] = []
    for _ in range(3):
        stepped, root = env.step_and_maybe_reset(answered(root, "ok", "ok"))
        seen += [stepped.get("policy_version").tolist(), stepped.get(("next", "policy_version")).tolist()]
        expected += [[version.version] * 2] * 2
        version.increment_version()
    assert seen == expected
    changes = [(change.old_version, change.new_version) for change in version.version_history]
    assert [new for _, new in changes[:-1]] == [old for old, _ in changes[1:]] and len(changes) == 4


def test_unknown_kind_of_version_is_an_error():
    with pytest.raises(ValueError, match="float"):
        PolicyVersion(float)  # type: ignore[arg-type]


class Reply(Transform):  # type: ignore[misc]
    """A transform that adds a message of the user."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = []
        for row in next_tensordict.unbind(0):
            history = row["history"].copy()
            history.prompt = lazy_stack([*history.prompt.unbind(0), type(history.prompt)(role="user", content="more")])
            rows.append(row.copy().set("history", history))
        return lazy_stack(rows)


@pytest.mark.defect("D29")
def test_tokens_contain_messages_of_later_transforms():
    env = TransformedEnv(ChatEnv(batch_size=(2,)), IncrementalTokenizer(TOKENIZER))
    env.append_transform(SimpleToolTransform({"four": lambda: 4})).append_transform(Reply())
    root = env.reset(TensorDict(query=["a", "bcd"], batch_size=[2]))
    sampled = [[200, 130, TOKENIZER.eos_token_id], [150]]  # the second was truncated
    rows = []
    for row, ids in zip(answered(root, "<tool>four\n</tool>", "x").unbind(0), sampled, strict=True):
        prompt = row["tokens"].prompt
        full = torch.cat([prompt, torch.tensor(ids)])
        mask = torch.arange(len(full)) >= len(prompt)
        row = row.copy().set("tokens", Tokens(prompt=prompt, full=full, batch_size=[]))
        rows.append(row.set("masks", Masks(all_attention_mask=mask | True, all_assistant_mask=mask, batch_size=[])))
    _, following = env.step_and_maybe_reset(lazy_stack(rows))
    for row, before, chat in zip(following.unbind(0), rows, chats(following), strict=True):
        ids, full = row["tokens"].prompt.tolist(), before["tokens"].full.tolist()
        assert ids[: len(full)] == full  # sampled tokens are never tokenized again
        assert [message["role"] for message in chat][-1] == "user"
        rendered = render_prompt(TOKENIZER, chat)
        tail = str(TOKENIZER.decode(rendered)).rpartition("more")[2]
        assert str(TOKENIZER.decode(ids)).endswith(f"more{tail}")
    assert "Tool four executed successfully" in TOKENIZER.decode(following[0]["tokens"].prompt.tolist())


class FirstIds(Transform):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__([("tokens", "prompt")], ["first"])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        ids = [row["tokens", "prompt"][0] for row in next_tensordict.unbind(0)]
        return next_tensordict.set("first", torch.stack(ids))

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        observation_spec["first"] = observation_spec["tokens", "prompt"]
        return observation_spec


def test_transforms_that_read_the_tokens_stay_behind():
    env, root = begun(IncrementalTokenizer(TOKENIZER), FirstIds())
    assert env.step(answered(root, "ok"))["next", "first"].shape == (1,)


def test_keys_of_history_and_tokens_can_be_chosen():
    env, root = begun(IncrementalTokenizer(TOKENIZER, tokens_key=("mine", "all")))
    assert ("mine", "all") in env.observation_spec.keys(True, True)
    assert root["mine", "all"][0].tolist() == render_prompt(TOKENIZER, [{"role": "user", "content": "?"}])
    with pytest.raises(ValueError, match="add_generation_prompt"):
        IncrementalTokenizer(TOKENIZER, add_generation_prompt=False)


def test_text_becomes_padded_ids_and_ids_become_text():
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "left"
    transform = Tokenizer(["query"], [("tokens_in", "ids")], ["said"], ["action"], tokenizer=tokenizer)
    root = transform(TensorDict(query=["abc", "d"], batch_size=[2]))
    mask = root["tokens_in", "attention_mask"].bool()
    assert mask.tolist() == [[True] * 3, [False, False, True]]
    assert tokenizer.decode(root["tokens_in", "ids"][1][mask[1]]) == "d"
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("abc", "de")]
    rows = lazy_stack([TensorDict(action=row, batch_size=[]) for row in ids])
    assert list(transform.inv(rows)["said"]) == ["abc", "de"]
    with pytest.raises(KeyError, match="query"):
        Tokenizer(["query"], ["ids"], tokenizer=tokenizer, missing_tolerance=False)(TensorDict(batch_size=[1]))


def test_rows_of_different_lengths_need_no_padding():
    transform = Tokenizer(["text"], ["ids"], tokenizer=TOKENIZER, padding=False)
    for data in (
        lazy_stack([TensorDict(text=text, batch_size=()) for text in ("a", "bcd")]),
        TensorDict(text=["a", "bcd"], batch_size=(2,)),
    ):
        rows = transform(data).unbind(0)
        assert [row["ids"].tolist() for row in rows] == [TOKENIZER(text)["input_ids"] for text in ("a", "bcd")]


@pytest.mark.defect("D40")
@pytest.mark.parametrize(
    "reply",
    ["the reply<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\nthe reply<|eot_id|>", "the reply"],
)
def test_line_with_the_end_token_keeps_its_text(reply: str):
    root = TensorDict(action=[reply], batch_size=[1])
    assert list(TemplateTransform().inv(root)["action"]) == ["the reply"]


def test_messages_of_an_environment_get_headers():
    start, end = "<|start_header_id|>", "<|end_header_id|>\n\n"
    rendered = f"{start}user{end}hello<|eot_id|>{start}assistant{end}"
    transform = TemplateTransform()
    root = transform._reset(TensorDict(batch_size=[1]), TensorDict(message=["hello"], batch_size=[1]))
    assert list(root["message"]) == [rendered]
    assert transform._call(TensorDict(message="hello", batch_size=[]))["message"] == rendered
    by_tokenizer = TemplateTransform(TOKENIZER)(TensorDict(message="hello", batch_size=[]))["message"]
    assert by_tokenizer == TOKENIZER.decode(render_prompt(TOKENIZER, [{"role": "user", "content": "hello"}]))
