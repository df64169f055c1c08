from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import StepCounter

from skyrl_train.tensordict.envs.chat import ChatEnv, DatasetChatEnv
from skyrl_train.tensordict.envs.conversation import history_of, messages_of
from skyrl_train.tensordict.envs.gsm8k import GSM8KEnv, GSM8KRewardParser
from skyrl_train.tensordict.envs.ifeval import IFEvalEnv, IfEvalScorer
from skyrl_train.tensordict.envs.llm_env import make_gsm8k_env
from skyrl_train.testing.tiny_models import byte_tokenizer

ROWS = [{"question": "How many clips?", "answer": "48 + 24 = 72\n#### 72"}]
PROMPT = "Answer. The form is <think>why</think><answer>number</answer>."


def answered(root: TensorDictBase, *texts: str) -> TensorDictBase:
    for row, text in zip(root.unbind(0), texts, strict=True):
        messages = messages_of(row["history"].prompt)
        row["history"].full = history_of([*messages, {"role": "assistant", "content": text}])
    return root


def rewards(*texts: str, **settings: Any) -> TensorDictBase:
    env = GSM8KEnv(dataset=ROWS, num_envs=len(texts), system_prompt=PROMPT, **settings)
    return env.step(answered(env.reset(), *texts))["next"]


def test_right_wrong_and_missing_answers_have_their_rewards_in_the_shape_of_a_step():
    found = rewards("<think>a</think><answer>72</answer>", "<answer>71</answer>", "I do not know")
    assert found["reward"].shape == (3, 1, 1)
    torch.testing.assert_close(found["reward"].flatten(), torch.tensor([1.0, 0.1, 0.0]))
    assert found["success"].flatten().tolist() == [True, False, False]
    assert found["reward_think"].flatten().tolist() == [1.0, 0.0, 0.0]
    assert found["reward_answer"].flatten().tolist() == [1.0, 1.0, 0.0]
    assert found["done"].all() and found["terminated"].flatten().tolist() == [True, True, False]


@pytest.mark.defect("D31")
def test_words_around_a_number_are_no_other_number_and_guesses_are_no_answer():
    texts = [
        "<answer>72 clips</answer>",
        "<answer>$72.00</answer>",
        "#### 72",
        "<answer>71</answer><answer>72</answer>",
    ]
    thought = "<think><answer>71</answer></think><answer>72</answer>"
    assert rewards(*texts, thought)["reward_right"].flatten().tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.defect("D31")
@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_the_answer_that_a_prompt_shows_is_not_the_models(mode: str):
    tokenizer = byte_tokenizer()
    system = "Write <answer></answer> or <answer>5</answer>."
    env = GSM8KEnv(dataset=ROWS, system_prompt=system, tokenizer=tokenizer, input_mode=mode)
    root = env.reset()
    if mode == "text":
        root["text_response"] = ["<answer>72</answer>"]
    else:
        row = root[0]
        row["tokens"].response = torch.tensor(tokenizer.encode("<answer>72</answer>"))
        row["tokens"].full = torch.cat([row["tokens"].prompt, row["tokens"].response])
    assert env.step(root)["next", "reward"].item() == 1.0


def test_rewards_of_one_step_add_up_and_those_of_the_step_before_do_not():
    rows = [{"query": "?", "answer": "#### 72"}]
    env = DatasetChatEnv(dataset=rows).append_transform(GSM8KRewardParser(set_done_if_answer=False))
    env.append_transform(GSM8KRewardParser(set_done_if_answer=False))
    root = env.reset()
    for _ in range(2):
        stepped, root = env.step_and_maybe_reset(answered(root, "#### 72"))
        assert stepped["next", "reward"].item() == 2.0


def test_a_row_without_a_number_is_an_error_that_shows_it():
    env = GSM8KEnv(dataset=[{"question": "?", "answer": "many"}])
    with pytest.raises(ValueError, match="many"):
        env.step(answered(env.reset(), "#### 1"))


def test_make_gsm8k_env_puts_questions_into_the_base_prompt_and_rewards_text():
    env = make_gsm8k_env(ROWS, num_envs=2, repeats=2, tokenizer=byte_tokenizer())
    root = env.reset()
    assert all("User: How many clips?. Assistant: <think>" in text for text in root["text"])
    root["text_response"] = ["</think><answer>72</answer>", "</think><answer>1</answer>"]
    following = env.step(root)["next"]
    torch.testing.assert_close(following["reward"].flatten(), torch.tensor([1.0, 0.1]))
    assert following["text"][0].endswith("<think></think><answer>72</answer>") and following["done"].all()


IFEVAL = [
    {
        "key": 1,
        "prompt": "Write without commas and end with over.",
        "instruction_id_list": ["startend:end_checker", "punctuation:no_comma"],
        "kwargs": [{"end_phrase": "over"}, {}],
    }
]


def test_instructions_that_are_followed_are_rewarded_by_weight_and_form():
    env = IFEvalEnv(dataset=IFEVAL, num_envs=3)
    texts = ("<think>A, B</think><answer>all good over</answer>", "<answer>all good, over</answer>", "all good over")
    following = env.step(answered(env.reset(), *texts))["next"]
    half = 0.3 * 0.5 + 0.1 * 0.5  # no prompt level, half of the instructions, strict and loose
    torch.testing.assert_close(following["reward"].flatten(), torch.tensor([1.15, half + 0.1, 1.0]))
    assert following["reward"].shape == (3, 1, 1)
    scores = following["ifeval_score"]
    assert scores.inst_level_strict_acc.tolist() == [[1.0], [0.5], [1.0]]
    assert scores.prompt_level_loose_acc.tolist() == [[1.0], [0.0], [1.0]]


def test_the_scorer_of_instructions_reads_histories_only():
    with pytest.raises(ValueError, match="history"):
        ChatEnv(input_mode="text").append_transform(IfEvalScorer())


def test_arguments_of_the_scorer_count_or_are_refused(caplog: pytest.LogCaptureFixture):
    rows = [IFEVAL[0] | {"number": "row seven"}]
    env = DatasetChatEnv(dataset=rows, data_key="prompt")
    env.append_transform(IfEvalScorer(prompt_key="prompt", id_key="number", verbose=True))
    with caplog.at_level("INFO", "skyrl_train.tensordict.envs.ifeval"):
        env.step(answered(env.reset(), "all good over"))
    assert "row row seven: reward 1.000" in caplog.text
    env = DatasetChatEnv(dataset=[{"number": "row seven", "prompt": "?"}], data_key="prompt")
    env.append_transform(IfEvalScorer(id_key="number"))
    with pytest.raises(ValueError, match="row seven"):
        env.step(answered(env.reset(), "all good over"))


def test_the_mode_of_a_reward_is_the_environments():
    ChatEnv().append_transform(GSM8KRewardParser(input_mode="history"))
    with pytest.raises(ValueError, match="input_mode='tokens', but the environment has 'history'"):
        ChatEnv().append_transform(GSM8KRewardParser(input_mode="tokens"))
    make_gsm8k_env(ROWS, tokenizer=byte_tokenizer()).append_transform(GSM8KRewardParser(input_mode="text"))


@pytest.mark.parametrize("answer", [72, torch.tensor(72)])
def test_answer_column_may_hold_numbers(answer: Any):
    env = GSM8KEnv(dataset=[{"question": "How many?", "answer": answer}])
    assert env.step(answered(env.reset(), "<answer>72</answer>"))["next", "success"].all()


def test_a_reward_by_any_name_is_that_of_its_step():
    rows = [{"question": "1 + 1 = ?", "answer": "#### 2"}]
    env = GSM8KEnv(dataset=rows, compute_reward=False, max_steps=2)
    names = ["answered", "thought", "right", "points", "good"]
    env.append_transform(GSM8KRewardParser(out_keys=names, set_done_if_answer=False))
    root = env.reset()
    for _ in range(4):  # two episodes of two steps
        root.set("text_response", ["<answer>2</answer>"])
        stepped, root = env.step_and_maybe_reset(root)
        assert stepped["next", "points"].item() == 1.0


def test_a_loader_gives_the_class_its_rows_and_nothing_else():
    env = GSM8KEnv.from_dataloader([[{"question": "1 + 1 = ?", "answer": "#### 2"}]], num_envs=2)
    root = env.reset()
    assert messages_of(root[0]["history"].prompt)[0]["role"] == "system"
    root.set("text_response", ["<answer>2</answer>", "none"])
    assert env.step(root)["next", "success"].flatten().tolist() == [True, False]
    with pytest.raises(TypeError, match="shuffle"):
        GSM8KEnv.from_dataloader([], shuffle=False)
    with pytest.raises(ValueError, match="num_envs=0"):
        GSM8KEnv(dataset=ROWS, num_envs=0)
    with pytest.raises(ValueError, match="ray_backend"):
        GSM8KEnv(dataset=[{"question": "1", "answer": "1"}], dataloader_actor_name="rows")


def test_a_column_of_one_row_is_not_the_next_rows():
    rows = [{"query": "a", "answer": "1", "hint": "only a's"}, {"query": "b", "answer": "2"}]
    env = DatasetChatEnv(dataset=rows, shuffle=False).append_transform(StepCounter(1))
    root = env.reset()
    assert root[0]["hint"] == "only a's"
    _, root = env.step_and_maybe_reset(root.set("text_response", ["x"]))
    assert root[0]["query"] == "b"
    assert root[0]["hint"] is None


class SecondLetter(GSM8KRewardParser):
    @staticmethod
    def normalize_answer(answer: str) -> str:
        return answer[1:2]


@pytest.mark.defect("reward-functions-missing")
def test_the_parts_of_a_reward_can_be_used_and_replaced():
    tags = GSM8KRewardParser.extract_tags("<think> a </think><answer> 1 </answer><answer>1.0</answer>")
    assert tags == ("a", "1") and GSM8KRewardParser.extract_tags("no") == ("", "")
    assert GSM8KRewardParser.extract_tags("<answer>1</answer><answer>2</answer>") == ("", "")
    written = ["$1,200.00", " 72. ", "50%", "120.0", "100", "0.50"]
    assert [GSM8KRewardParser.normalize_answer(text) for text in written] == ["1200", "72", "50", "120", "100", "0.5"]
    env = GSM8KEnv(dataset=[{"question": "?", "answer": "#### 12"}], compute_reward=False, num_envs=2)
    env.append_transform(SecondLetter())
    found = env.step(answered(env.reset(), "<think>a</think><answer>32</answer>", "<answer>13</answer>"))["next"]
    torch.testing.assert_close(found["reward"].flatten(), torch.tensor([1.0, 0.1]))
    assert found["reward_think"].flatten().tolist() == [1, 0]


@pytest.mark.defect("reward-functions-missing")
def test_the_reward_of_instructions_can_be_aggregated_by_ones_own_function():
    seen: list[Any] = []

    def aggregate(score: Any, think_blocks: Any, answer_blocks: Any, complete: Any) -> torch.Tensor:
        seen.append((think_blocks, answer_blocks, complete))
        return scorer.default_reward_aggregator(score, think_blocks, answer_blocks, complete) * 2

    scorer = IfEvalScorer(aggregate_reward=aggregate)
    env = DatasetChatEnv(dataset=IFEVAL, data_key="prompt").append_transform(scorer)
    following = env.step(answered(env.reset(), "<think>A, B</think><answer>all good over</answer>"))["next"]
    assert following["reward"].item() == pytest.approx(2.3)
    assert seen == [(["A, B"], ["all good over"], True)]
    both = scorer.default_reward_aggregator(following["ifeval_score"])
    assert both.flatten().tolist() == pytest.approx([1.0])
    plain = IfEvalScorer(aggregate_reward=lambda score: score.prompt_level_strict_acc)
    env = DatasetChatEnv(dataset=IFEVAL, data_key="prompt").append_transform(plain)
    assert env.step(answered(env.reset(), "all good over"))["next", "reward"].item() == 1
