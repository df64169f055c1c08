from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from skyrl_train.algorithms.advantages import grpo
from skyrl_train.tensordict.containers import LogProbs, Masks, Tokens
from skyrl_train.tensordict.envs.base import StepCounter, Transform
from skyrl_train.tensordict.envs.chat import ChatEnv
from skyrl_train.tensordict.envs.conversation import messages_of
from skyrl_train.tensordict.envs.kl import KLRewardTransform, RetrieveLogProb
from skyrl_train.tensordict.envs.llm_env import LLMEnv, LLMHashingEnv
from skyrl_train.tensordict.envs.primer import DataLoadingPrimer, as_nested_tensor, as_padded_tensor
from skyrl_train.tensordict.envs.text import IncrementalTokenizer, TemplateTransform, Tokenizer
from skyrl_train.tensordict.envs.versions import PolicyVersion
from skyrl_train.tensordict.losses.mc_advantage import MCAdvantage
from skyrl_train.testing.tiny_models import byte_tokenizer

RAGGED = [
    TensorDict(ids=torch.tensor([1, 2, 3]), n=torch.tensor(1)),
    TensorDict(ids=torch.tensor([4]), n=torch.tensor(2)),
]


def said(root: TensorDictBase) -> TensorDictBase:
    root["text_response"] = ["ok"] * len(root)
    return root


@pytest.mark.defect("D32")
def test_the_version_of_a_step_is_the_one_that_acted_in_it():
    env, version = ChatEnv(), PolicyVersion()
    env.append_transform(version)
    root = env.reset(TensorDict(query=["?"], batch_size=[1]))
    seen = []
    for true in range(3):
        stepped, root = env.step_and_maybe_reset(said(root))
        seen.append((int(stepped["policy_version"]), int(stepped["next", "policy_version"]), true))
        version.increment_version()
    assert seen == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    assert [(change.old_version, change.new_version) for change in version.version_history[1:]] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]


def test_versions_can_be_unique_names():
    env, version = ChatEnv(batch_size=(2,)), PolicyVersion("uuid")
    env.append_transform(version)
    root = env.reset(TensorDict(query=["?", "!"], batch_size=[2]))
    first = version.version
    assert list(root["policy_version"]) == [first, first]
    version.increment_version()
    assert list(env.step(said(root))["next", "policy_version"]) == [version.version] * 2 != [first] * 2
    with pytest.raises(ValueError, match="float"):
        PolicyVersion(float)


def test_ragged_rows_are_nested_or_padded_on_the_left():
    nested, padded = as_nested_tensor(RAGGED), as_padded_tensor(RAGGED)
    assert [row.tolist() for row in nested["ids"].unbind()] == [[1, 2, 3], [4]]
    assert padded["ids"].tolist() == [[1, 2, 3], [0, 0, 4]] and padded["n"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="-1"):
        as_padded_tensor(RAGGED, dim=-1)


def test_a_primer_takes_exactly_one_loader_and_only_rows():
    cases: list[dict[str, Any]] = [{}, {"dataloader": [], "dataloader_factory": list}]
    for settings in cases:
        with pytest.raises(ValueError, match="exactly one"):
            DataLoadingPrimer(**settings)
    with pytest.raises(TypeError, match="int"):
        DataLoadingPrimer([1]).take(1)
    with pytest.raises(ValueError, match="one dimension"):
        DataLoadingPrimer([TensorDict(batch_size=[2, 2])]).take(1)
    with pytest.raises(ValueError, match="no rows"):
        DataLoadingPrimer([]).take(1)


def test_a_factory_makes_the_loader_of_every_pass_and_stacks_are_chosen_by_name():
    passes: list[int] = []

    def loader() -> list[TensorDict]:
        passes.append(len(passes))
        return RAGGED

    primer = DataLoadingPrimer(dataloader_factory=loader, stack_method="as_padded_tensor", batch_size=(4,))
    assert primer()["ids"].tolist() == [[1, 2, 3], [0, 0, 4]] * 2 and passes == [0, 1]


def test_text_becomes_padded_ids_with_a_mask_and_ids_become_text():
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "left"
    transform = Tokenizer(["query"], [("tokens_in", "ids")], ["action"], ["said"], tokenizer=tokenizer)
    root = transform(TensorDict(query=["abc", "d"], batch_size=[2]))
    mask = root["tokens_in", "attention_mask"]
    assert mask.tolist() == [[True] * 3, [False, False, True]]
    assert tokenizer.decode(root["tokens_in", "ids"][1][mask[1]]) == "d"
    root = transform.before_step(TensorDict(action=root["tokens_in", "ids"][:1], batch_size=[1]))
    assert root["said"] == ["abc"]
    with pytest.raises(KeyError, match="query"):
        Tokenizer(["query"], ["ids"], tokenizer=tokenizer, missing_tolerance=False)(TensorDict(batch_size=[1]))


@pytest.mark.defect("D40")
@pytest.mark.parametrize(
    "reply",
    ["the reply<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\nthe reply<|eot_id|>", "the reply"],
)
def test_the_line_with_the_end_of_the_turn_keeps_its_text(reply: str):
    root = TensorDict(action=[reply], batch_size=[1])
    assert TemplateTransform().before_step(root)["action"] == ["the reply"]


def test_what_an_environment_says_gets_headers_once():
    transform = TemplateTransform()
    root = transform.after_reset(TensorDict(batch_size=[1]), TensorDict(message=["hello"], batch_size=[1]))
    begun, end = "<|start_header_id|>user<|end_header_id|>\n\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert root["message"] == [f"{begun}hello<|eot_id|>{end}"]
    again = transform.after_step(root, TensorDict(message=list(root["message"]), batch_size=[1]))
    assert again["message"] == root["message"]


class Scorer:
    """A model that gives every token the same log-prob."""

    generate = False
    return_log_probs = True
    log_probs_key = "ref_log_probs"

    def __init__(self, input_mode: str, value: float):
        self.input_mode, self.value = input_mode, value

    def __call__(self, root: TensorDictBase) -> TensorDictBase:
        rows = []
        for row in root.unbind(0):
            length = len(row["tokens"].full) if self.input_mode == "tokens" else 4
            values = torch.full((length,), self.value, requires_grad=torch.is_grad_enabled())
            row.set("ref_log_probs", LogProbs(full=values, batch_size=[]))
            row.set("masks", Masks(all_assistant_mask=torch.arange(length) >= length - 2, batch_size=[]))
            rows.append(row)
        return lazy_stack(rows)


class GivesReward(Transform):
    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        return following.set("reward", torch.ones(len(following), 1, 1))


class Halves(Transform):
    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        return following.set("reward", torch.ones(len(following), 2, 1))


def spoken(lengths: tuple[int, int], assistant: bool) -> tuple[ChatEnv, TensorDictBase]:
    """An environment of tokens, and an action of so many tokens after prompts with log-probs -1."""
    env = ChatEnv(input_mode="tokens", tokenizer=byte_tokenizer(), batch_size=(2,))
    env.append_transform(GivesReward())
    root = env.reset(TensorDict(query=["a", "bc"], batch_size=[2]))
    for row, length in zip(root.unbind(0), lengths, strict=True):
        prompt = row["tokens"].prompt
        full = torch.cat([prompt, torch.arange(length)])
        row.set("tokens", Tokens(prompt=prompt, full=full, batch_size=[]))
        row.set("log_probs", LogProbs(full=torch.full((len(full),), -1.0), batch_size=[]))
        mask = torch.arange(len(full)) >= len(full) - 1
        row.set("masks", Masks(all_assistant_mask=mask if assistant else None, batch_size=[]))
    return env, root


@pytest.mark.defect("D30")
@pytest.mark.parametrize("assistant_only", [True, False])
def test_kl_is_taken_off_the_reward_on_the_tokens_that_count(assistant_only: bool):
    env, root = spoken((3, 2), assistant=True)
    env.append_transform(KLRewardTransform(Scorer("tokens", -1.5), coef=2.0, assistant_only=assistant_only))
    for row, length in zip(env.step(root).unbind(0), (3, 2), strict=True):
        counted = 1 if assistant_only else length
        total = len(row["tokens"].full)
        kl = torch.tensor([0.0] * (total - counted) + [0.5] * counted).unsqueeze(-1)
        torch.testing.assert_close(row["next", "kl_penalty"], kl)
        on_the_last = torch.tensor([0.0] * (total - 1) + [1.0]).unsqueeze(-1)
        torch.testing.assert_close(row["next", "reward"], on_the_last - 2.0 * kl)
        assert row["next"]["ref_log_probs"].full.tolist() == [-1.5] * total


def test_returns_do_not_grow_with_length_and_advantages_are_the_trainers():
    env, root = spoken((40, 3), assistant=False)
    env.append_transform(KLRewardTransform(Scorer("tokens", -1.5), coef=0.01))  # 0.5 nats a token
    stepped = env.step(root)
    returns = [1.0 - 0.01 * 0.5 * length for length in (40, 3)]
    for row, wanted in zip(stepped.unbind(0), returns, strict=True):
        assert float(row["next", "reward"].sum()) == pytest.approx(wanted)
    for row in stepped.unbind(0):
        row.set("group", torch.tensor(0))
        row["next"].set("done", torch.tensor([True]))
    found = MCAdvantage(2, prompt_key="group").inv(stepped.unsqueeze(1))  # [B, T]
    assert found is not None
    expected = grpo(
        torch.tensor(returns), torch.zeros(2, dtype=torch.int64), torch.ones(2).bool(), grpo_norm_by_std=True
    )
    for row, advantage in zip(found.unbind(0), expected, strict=True):
        assert row["advantage"].shape == row["next", "reward"].shape
        torch.testing.assert_close(row["advantage"].unique(), advantage.reshape(1), rtol=1e-3, atol=1e-3)


def test_a_reward_of_every_token_keeps_its_place_and_others_must_be_one_number():
    env, root = spoken((3, 2), assistant=False)
    env.append_transform(KLRewardTransform(Scorer("tokens", -1.5), coef=1.0))
    env.append_transform(KLRewardTransform(Scorer("tokens", -1.5), coef=2.0))
    for row, length in zip(env.step(root)["next"].unbind(0), (3, 2), strict=True):
        assert float(row["reward"].sum()) == pytest.approx(1.0 - 3.0 * 0.5 * length)
    env, root = spoken((3, 2), assistant=False)
    env.append_transform(Halves())
    env.append_transform(KLRewardTransform(Scorer("tokens", -1.5)))
    with pytest.raises(ValueError, match="2 values for"):
        env.step(root)


@pytest.mark.defect("D30")
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda env, row: row.set("log_probs", LogProbs(batch_size=[])), KeyError, "no log-probs under"),
        (lambda env, row: row["tokens"].set("prompt", None), KeyError, "all_assistant_mask"),
        (lambda env, row: env.transforms.pop(0), KeyError, "'reward' is missing"),
    ],
)
def test_missing_inputs_of_a_penalty_are_reported(change: Callable[..., Any], error: type[Exception], words: str):
    env, root = spoken((3, 2), assistant=False)
    env.append_transform(KLRewardTransform(Scorer("tokens", -1.5)))
    change(env, root[0])
    with pytest.raises(error, match=words):
        env.step(root)


def test_kl_without_an_assistant_mask_counts_what_follows_the_prompt_and_may_only_be_shown():
    env, root = spoken((3, 2), assistant=False)
    env.append_transform(KLRewardTransform(ref_model_factory=lambda: Scorer("tokens", -1.5), add_to_reward=False))
    following = env.step(root)["next"]
    assert [float(row["kl_penalty"].sum()) for row in following.unbind(0)] == [1.5, 1.0]
    assert following["reward"].flatten().tolist() == [1.0, 1.0]


def test_models_that_cannot_score_are_refused():
    generates = Scorer("tokens", 0.0)
    generates.generate = True
    for make in (KLRewardTransform, RetrieveLogProb):
        with pytest.raises(ValueError, match="generate=False"):
            make(generates)
    with pytest.raises(ValueError, match="tokens"):
        KLRewardTransform(Scorer("history", 0.0))
    with pytest.raises(ValueError, match="history"):
        RetrieveLogProb(Scorer("tokens", 0.0))
    with pytest.raises(ValueError, match="exactly one"):
        KLRewardTransform()


@pytest.mark.parametrize("detach", [True, False])
def test_log_probs_of_a_reference_are_written_next_for_the_assistants_tokens(detach: bool):
    env = ChatEnv(batch_size=(2,))
    env.append_transform(RetrieveLogProb(Scorer("history", -3.0), detach=detach))
    root = env.reset(TensorDict(query=["a", "b"], batch_size=[2]))
    stepped = env.step(said(root))
    for row in stepped["next"].unbind(0):
        assert row["ref_log_probs"].full.tolist() == [0.0, 0.0, -3.0, -3.0]
        assert row["ref_log_probs"].full.requires_grad != detach
    assert "ref_log_probs" not in set(stepped.keys())


@pytest.mark.defect("logprobs-require-next")
def test_log_probs_of_a_reference_can_be_written_beside_data_without_a_next_step():
    env = ChatEnv(batch_size=(2,))
    root = said(env.reset(TensorDict(query=["a", "b"], batch_size=[2])))
    env.step(root)
    data = root.exclude("next")
    found = RetrieveLogProb(Scorer("history", -3.0))(data)
    assert "next" not in set(found.keys())
    stacked = lazy_stack([data.exclude("ref_log_probs"), data.exclude("ref_log_probs")], 1)
    for row in (*found.unbind(0), *RetrieveLogProb(Scorer("history", -3.0))(stacked)[:, 1].unbind(0)):
        assert row["ref_log_probs"].full.tolist() == [0.0, 0.0, -3.0, -3.0]
    with pytest.raises(KeyError, match="next"):
        KLRewardTransform(Scorer("tokens", -3.0))(data)


def test_llm_env_puts_texts_and_ids_after_each_other_and_ends_with_the_eos():
    with pytest.warns(DeprecationWarning, match="ChatEnv"):
        env = LLMEnv.from_dataloader([{"text": "one "}], num_envs=2)
    root = env.reset()
    root["text_response"] = ["two", "three"]
    assert env.step(root)["next", "text"] == ["one two", "one three"]
    with pytest.warns(DeprecationWarning, match="ChatEnv"):
        env = LLMEnv(from_text=False, eos_token_id=9, assign_reward=True, assign_done=True, batch_size=(2,))
    root = env.reset(TensorDict(tokens=torch.tensor([[1, 2], [3, 4]]), batch_size=[2]))
    root["tokens_response"] = torch.tensor([[5, 9], [9, 5]])
    following = env.step(root)["next"]
    assert following["tokens"].tolist() == [[1, 2, 5, 9], [3, 4, 9, 5]]
    assert following["done"].tolist() == [[True], [False]] and following["reward"].shape == (2, 2, 1)
    assert following["token_done"].flatten().tolist() == [False, True, False, False]
    with pytest.warns(DeprecationWarning, match="ChatEnv"), pytest.raises(ValueError, match="from_text"):
        LLMEnv(assign_reward=True)


def test_hashes_name_prefixes_the_same_in_every_process_and_differ_where_they_do():
    env = LLMHashingEnv(tokenizer=byte_tokenizer(), batch_size=(2,))
    root = env.reset(TensorDict(text=["ab", "ab"], batch_size=[2]))
    assert root["hashing"][0] == root["hashing"][1] and root["hash"].equal(root["hashing"])
    root["action"] = torch.tensor([[5], [6]])
    following = env.step(root)["next"]
    assert following["hashing"][0] != following["hashing"][1]
    assert following["observation"].shape == (2, 3) and following["text"][0].startswith("ab")
    again = LLMHashingEnv(vocab_size=10)
    assert (
        int(again.reset(TensorDict(observation=torch.tensor([[1, 2]]), batch_size=[1]))["hashing"])
        == -6578062687609052266
    )
    with pytest.raises(TypeError, match="vocab_size"):
        LLMHashingEnv()


def test_a_transform_serves_one_environment():
    counter = StepCounter(2)
    ChatEnv().append_transform(counter)
    with pytest.raises(RuntimeError, match="StepCounter"):
        ChatEnv().append_transform(counter)


def test_messages_survive_histories():
    root: Any = ChatEnv().reset(TensorDict(query=["a\n\n b "], batch_size=[1]))
    assert messages_of(root[0]["history"].prompt) == [{"role": "user", "content": "a\n\n b "}]


def test_rows_of_different_lengths_need_no_padding_and_other_options_are_reported():
    tokenizer = Tokenizer(["text"], ["ids"], tokenizer=byte_tokenizer(), padding=False)
    stacked = lazy_stack([TensorDict(text=text, batch_size=()) for text in ("a", "bcd")])
    made = byte_tokenizer()
    assert [row["ids"].tolist() for row in tokenizer(stacked).unbind(0)] == [made(t)["input_ids"] for t in ("a", "bcd")]
    with pytest.raises(ValueError, match="lazy stack"):
        tokenizer(TensorDict(text=["a", "bcd"], batch_size=(2,)))
    with pytest.raises(ValueError, match="stack_dim=1"):
        as_padded_tensor([TensorDict(ids=torch.ones(2))], stack_dim=1)
    with pytest.raises(ValueError, match="with_tokenizer"):
        ChatEnv(input_mode="text", tokenizer=byte_tokenizer(), with_tokenizer=True)
    with pytest.raises(ValueError, match="add_generation_prompt"):
        IncrementalTokenizer(byte_tokenizer(), add_generation_prompt=False)
