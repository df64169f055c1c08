from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from skyrl_train.data.chat import render_messages
from skyrl_train.data.messages import Message
from skyrl_train.errors import ConfigError, DeadlineExceeded, EnvironmentFailure, RewardModelLost
from skyrl_train.learner.reward_worker import RewardModel, RewardWorker, Score
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.testing.tiny_models import CHATML, byte_tokenizer, save_tiny_model, save_tiny_reward_model

ENDS_IN_EOS = CHATML.replace("{{ '\n' }}", "")
"""ChatML without the line break after an answer."""


def conversation(answer: str, question: str = "2 + 2?") -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ANSWERS = [conversation("four"), conversation("5, because I say so\n"), conversation("")]


def worker(path: str, **options: Any) -> RewardWorker:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "model_config_kwargs": {}}
    made = RewardWorker(path, **settings | options)
    made.setup()
    return made


def score(path: str, conversations: list[list[Message]], **options: Any) -> list[Score]:
    return worker(path, **options).score(conversations)


def use_template(folder: Path, template: str | None) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    for file in folder.glob("*template*"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    return str(folder)


def by_hand(path: str, messages: list[Message]) -> list[float]:
    """The head on every position's hidden state, in double precision."""
    model = AutoModelForSequenceClassification.from_pretrained(path).double()
    rendered = load_tokenizer(path).apply_chat_template(messages, return_dict=False)
    with torch.no_grad():
        hidden = model.model(torch.tensor([rendered]), use_cache=False).last_hidden_state[0]
        return (hidden @ model.score.weight[0]).tolist()


def failure(one: Score) -> EnvironmentFailure:
    assert isinstance(one, EnvironmentFailure)
    return one


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_scores_are_the_head_on_the_last_token_of_the_models_own_rendering(tmp_path: Path, kind: str):
    path = save_tiny_reward_model(tmp_path, kind)
    found = score(path, ANSWERS)
    assert found == pytest.approx([by_hand(path, one)[-1] for one in ANSWERS], rel=1e-5)
    assert len(set(found)) == 3


def test_a_score_does_not_depend_on_what_else_is_scored(tmp_path: Path):
    loaded = worker(save_tiny_reward_model(tmp_path))
    alone = [loaded.score([one])[0] for one in ANSWERS]
    assert loaded.score([*ANSWERS, *ANSWERS]) == alone * 2


@pytest.mark.parametrize(("pad_token_id", "place"), [(0, -1), (2, -2), (None, -1)])
def test_a_conversation_is_read_where_the_model_reads_it_since_its_head_was_trained_there(
    tmp_path: Path, pad_token_id: int | None, place: int
):
    """Models whose padding token also ends a turn (2 here) were trained on the token before it."""
    path = save_tiny_reward_model(tmp_path, pad_token_id=pad_token_id)
    use_template(tmp_path, ENDS_IN_EOS)
    (found,) = score(path, [conversation("four")])
    assert found == pytest.approx(by_hand(path, conversation("four"))[place], rel=1e-5)
    assert found != pytest.approx(by_hand(path, conversation("four"))[-3 - place], rel=0.01)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_scores_too(tmp_path: Path, kind: str):
    path = save_tiny_reward_model(tmp_path, kind, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    ids = load_tokenizer(path).apply_chat_template(ANSWERS[1], return_tensors="pt", return_dict=False)
    with torch.no_grad():
        wanted = model(ids, attention_mask=torch.ones_like(ids)).logits.item()
    assert score(path, [ANSWERS[1]]) == pytest.approx([wanted], rel=1e-5)


@pytest.mark.parametrize(("kind", "longest"), [("qwen2", 40), ("bert", 40), ("roberta", 39)])
def test_a_conversation_beyond_the_models_positions_fails_and_one_at_the_limit_does_not(
    tmp_path: Path, kind: str, longest: int
):
    loaded = worker(save_tiny_reward_model(tmp_path, kind, max_position_embeddings=40, pad_token_id=0))
    around = len(loaded.tokenizer.apply_chat_template(conversation("", "?"), return_dict=False))
    fits, too_long = (conversation("x" * (longest + more - around), "?") for more in (0, 1))
    found = loaded.score([fits, too_long])
    assert isinstance(found[0], float)
    assert failure(found[1]).kind == "reward_model_too_long"
    assert failure(found[1]).detail == f"{longest + 1} tokens of at most {longest}"


def test_a_score_that_is_not_finite_is_a_failure(tmp_path: Path):
    loaded = worker(save_tiny_reward_model(tmp_path))
    torch.nn.init.constant_(loaded.model.score.weight, float("nan"))  # type: ignore[union-attr, arg-type]
    (found,) = loaded.score([ANSWERS[0]])
    assert (failure(found).kind, "nan" in failure(found).detail) == ("bad_reward", True)


def test_messages_that_the_template_refuses_fail_and_leave_the_others_alone(tmp_path: Path):
    path = save_tiny_reward_model(tmp_path)
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    use_template(tmp_path, refuses + CHATML)
    found = score(path, [[{"role": "system", "content": "be brief"}, *ANSWERS[0]], ANSWERS[0]])
    assert failure(found[0]).kind == "reward_model_template"
    assert "no system role" in failure(found[0]).detail
    assert isinstance(found[1], float)


def test_control_tokens_spelt_in_an_answer_are_read_as_text():
    tokenizer = byte_tokenizer()
    spelt, plain = (render_messages(tokenizer, conversation(text)) for text in ("a<|im_end|>", "a"))
    assert plain == tokenizer.apply_chat_template(conversation("a"), return_dict=False)
    assert spelt.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(spelt).count("<|im_end|>") == 3


def test_a_model_without_a_chat_template_is_refused_with_what_to_do(tmp_path: Path):
    save_tiny_reward_model(tmp_path)
    with pytest.raises(ConfigError, match=r"^trainer\.reward\.model\.path=.*no chat template.*chat_template\.jinja"):
        worker(use_template(tmp_path, None))


def test_a_causal_language_model_is_refused_also_when_it_is_told_to_have_one_output(tmp_path: Path):
    path = save_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=r"^trainer\.reward\.model\.path=.*num_labels=2; a reward model has one"):
        worker(path)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors, such as 'score\.weight'"):
        worker(path, model_config_kwargs={"num_labels": 1})


def test_a_classifier_of_several_classes_is_refused(tmp_path: Path):
    path = save_tiny_reward_model(tmp_path, num_labels=3)
    with pytest.raises(ConfigError, match="num_labels=3"):
        worker(path)
    with pytest.raises(ConfigError, match=r"must contain .* of a sequence classification model"):
        worker(path, model_config_kwargs={"num_labels": 1})


def test_a_head_that_the_class_does_not_know_is_refused(tmp_path: Path):
    path = save_tiny_reward_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "score.bias": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"^trainer\.reward\.model\.path=.*no parameter for 'score\.bias'"):
        worker(path)


def test_an_encoder_decoder_is_refused(tmp_path: Path):
    AutoConfig.for_model("bart", num_labels=1).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="BartConfig has an encoder and a decoder"):
        worker(str(tmp_path))


class Replica:
    """Answers with its own number when it is told to; notices calls that overlap."""

    def __init__(self, number: float):
        self.number = number
        self.calls = self.running = 0
        self.most = 0
        self.gate = asyncio.Event()

    async def score(self, conversations: Any) -> list[float]:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await self.gate.wait()
        self.running -= 1
        return [self.number] * len(conversations)


def test_groups_go_to_whichever_replica_is_free_one_at_a_time_each():
    async def run() -> tuple[list[Replica], list[list[Score]]]:
        replicas = [Replica(1.0), Replica(2.0)]
        model = RewardModel(replicas)
        waiting = [asyncio.ensure_future(model.score([ANSWERS[0]])) for _ in range(6)]
        await asyncio.sleep(0.2)
        assert [one.running for one in replicas] == [1, 1]
        replicas[1].gate.set()  # the first one hangs: the other does the rest
        await asyncio.sleep(0.2)
        assert [one.calls for one in replicas] == [1, 5]
        replicas[0].gate.set()
        return replicas, await asyncio.gather(*waiting)

    replicas, found = asyncio.run(run())
    assert [one.most for one in replicas] == [1, 1]
    assert found == [[1.0], *[[2.0]] * 5]


def test_a_replica_whose_caller_was_cancelled_is_free_only_when_it_is_done():
    async def run() -> None:
        replica = Replica(1.0)
        model = RewardModel([replica])
        first, second = (asyncio.ensure_future(model.score([ANSWERS[0]])) for _ in range(2))
        await asyncio.sleep(0.2)
        first.cancel()
        await asyncio.sleep(0.2)
        assert replica.calls == 1
        replica.gate.set()
        assert await second == [1.0]
        assert replica.most == 1

    asyncio.run(run())


@pytest.mark.defect("a-lost-reward-model-was-no-restart")
def test_nobody_waits_for_a_replica_that_hangs():
    class Hangs(Replica):
        async def score(self, conversations: Any) -> list[float]:
            await super().score(conversations)
            raise DeadlineExceeded("reward model 0.score", 5)

    async def run() -> None:
        replica = Hangs(1.0)
        model = RewardModel([replica])
        waiting = [asyncio.ensure_future(model.score([ANSWERS[0]])) for _ in range(3)]
        await asyncio.sleep(0.2)
        replica.gate.set()
        found = await asyncio.gather(*waiting, model.score([ANSWERS[0]]), return_exceptions=True)
        assert [type(one) for one in found] == [RewardModelLost] * 4
        assert [type(cast(RewardModelLost, one).__cause__) for one in found] == [DeadlineExceeded] * 4
        assert all("reward model 0.score did not finish within 5 s" in str(one) for one in found)
        assert replica.calls == 1

    asyncio.run(run())
