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
from skyrl_train.learner.reward_worker import RewardModel, RewardWorker, ScoreResult
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.testing.tiny_models import CHATML, byte_tokenizer, save_tiny_model, save_tiny_reward_model

ENDS_IN_EOS = CHATML.replace("{{ '\n' }}", "")
"""ChatML without the line break after an answer."""


def conversation(answer: str, question: str = "2 + 2?") -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ANSWERS = [conversation("four"), conversation("5, because I say so\n"), conversation("")]


def worker(path: str, **options: Any) -> RewardWorker:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "model_config_kwargs": {}}
    reward_worker = RewardWorker(path, **settings | options)
    reward_worker.setup()
    return reward_worker


def score(path: str, conversations: list[list[Message]], **options: Any) -> list[ScoreResult]:
    return worker(path, **options).score(conversations)


def use_template(folder: Path, template: str | None) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    for file in folder.glob("*template*"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    return str(folder)


def scores_by_position(path: str, messages: list[Message]) -> list[float]:
    """Return the head's output at every position, computed in double precision."""
    model = AutoModelForSequenceClassification.from_pretrained(path).double()
    rendered = load_tokenizer(path).apply_chat_template(messages, return_dict=False)
    with torch.no_grad():
        hidden = model.model(torch.tensor([rendered]), use_cache=False).last_hidden_state[0]
        return (hidden @ model.score.weight[0]).tolist()


def failure(result: ScoreResult) -> EnvironmentFailure:
    assert isinstance(result, EnvironmentFailure)
    return result


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_score_is_the_head_at_the_last_token(tmp_path: Path, kind: str):
    path = save_tiny_reward_model(tmp_path, kind)
    scores = score(path, ANSWERS)
    assert scores == pytest.approx([scores_by_position(path, answer)[-1] for answer in ANSWERS], rel=1e-5)
    assert len(set(scores)) == 3


def test_score_does_not_depend_on_other_conversations(tmp_path: Path):
    loaded = worker(save_tiny_reward_model(tmp_path))
    alone = [loaded.score([answer])[0] for answer in ANSWERS]
    assert loaded.score([*ANSWERS, *ANSWERS]) == alone * 2


@pytest.mark.parametrize(("pad_token_id", "position"), [(0, -1), (2, -2), (None, -1)])
def test_score_position_matches_the_trained_head(tmp_path: Path, pad_token_id: int | None, position: int):
    """Models whose padding token also ends a turn (2 here) were trained on the token before it."""
    path = save_tiny_reward_model(tmp_path, pad_token_id=pad_token_id)
    use_template(tmp_path, ENDS_IN_EOS)
    (actual,) = score(path, [conversation("four")])
    assert actual == pytest.approx(scores_by_position(path, conversation("four"))[position], rel=1e-5)
    assert actual != pytest.approx(scores_by_position(path, conversation("four"))[-3 - position], rel=0.01)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_encoder_computes_scores(tmp_path: Path, kind: str):
    path = save_tiny_reward_model(tmp_path, kind, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    ids = load_tokenizer(path).apply_chat_template(ANSWERS[1], return_tensors="pt", return_dict=False)
    with torch.no_grad():
        expected = model(ids, attention_mask=torch.ones_like(ids)).logits.item()
    assert score(path, [ANSWERS[1]]) == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize(("kind", "longest"), [("qwen2", 40), ("bert", 40), ("roberta", 39)])
def test_conversation_beyond_max_positions_fails(tmp_path: Path, kind: str, longest: int):
    loaded = worker(save_tiny_reward_model(tmp_path, kind, max_position_embeddings=40, pad_token_id=0))
    overhead = len(loaded.tokenizer.apply_chat_template(conversation("", "?"), return_dict=False))
    fits, too_long = (conversation("x" * (longest + extra - overhead), "?") for extra in (0, 1))
    results = loaded.score([fits, too_long])
    assert isinstance(results[0], float)
    assert failure(results[1]).kind == "reward_model_too_long"
    assert failure(results[1]).detail == f"{longest + 1} tokens, at most {longest} allowed"


def test_nonfinite_score_is_a_failure(tmp_path: Path):
    loaded = worker(save_tiny_reward_model(tmp_path))
    torch.nn.init.constant_(loaded.model.score.weight, float("nan"))  # type: ignore[union-attr, arg-type]
    (result,) = loaded.score([ANSWERS[0]])
    assert (failure(result).kind, "nan" in failure(result).detail) == ("bad_reward", True)


def test_unrenderable_messages_fail_alone(tmp_path: Path):
    path = save_tiny_reward_model(tmp_path)
    rejects = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    use_template(tmp_path, rejects + CHATML)
    results = score(path, [[{"role": "system", "content": "be brief"}, *ANSWERS[0]], ANSWERS[0]])
    assert failure(results[0]).kind == "reward_model_template"
    assert "no system role" in failure(results[0]).detail
    assert isinstance(results[1], float)


def test_control_tokens_in_answers_are_plain_text():
    tokenizer = byte_tokenizer()
    with_control_text, plain = (render_messages(tokenizer, conversation(text)) for text in ("a<|im_end|>", "a"))
    assert plain == tokenizer.apply_chat_template(conversation("a"), return_dict=False)
    assert with_control_text.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(with_control_text).count("<|im_end|>") == 3


def test_model_without_chat_template_is_rejected(tmp_path: Path):
    save_tiny_reward_model(tmp_path)
    with pytest.raises(ConfigError, match=r"^trainer\.reward\.model\.path=.*no chat template.*chat_template\.jinja"):
        worker(use_template(tmp_path, None))


def test_causal_lm_is_rejected_even_with_one_label(tmp_path: Path):
    path = save_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=r"^trainer\.reward\.model\.path=.*num_labels=2; a reward model has one"):
        worker(path)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors, such as 'score\.weight'"):
        worker(path, model_config_kwargs={"num_labels": 1})


def test_classifier_with_several_classes_is_rejected(tmp_path: Path):
    path = save_tiny_reward_model(tmp_path, num_labels=3)
    with pytest.raises(ConfigError, match="num_labels=3"):
        worker(path)
    with pytest.raises(ConfigError, match=r"must contain .* of a sequence classification model"):
        worker(path, model_config_kwargs={"num_labels": 1})


def test_unknown_head_is_rejected(tmp_path: Path):
    path = save_tiny_reward_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "score.bias": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"^trainer\.reward\.model\.path=.*no parameter for 'score\.bias'"):
        worker(path)


def test_encoder_decoder_is_rejected(tmp_path: Path):
    AutoConfig.for_model("bart", num_labels=1).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="BartConfig has an encoder and a decoder"):
        worker(str(tmp_path))


class Replica:
    """A replica that returns its number once its gate is open, and counts overlapping calls."""

    def __init__(self, number: float):
        self.number = number
        self.calls = self.running = 0
        self.max_running = 0
        self.gate = asyncio.Event()

    async def score(self, conversations: Any) -> list[float]:
        self.calls += 1
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await self.gate.wait()
        self.running -= 1
        return [self.number] * len(conversations)


def test_groups_go_to_the_next_free_replica():
    async def run() -> tuple[list[Replica], list[list[ScoreResult]]]:
        replicas = [Replica(1.0), Replica(2.0)]
        model = RewardModel(replicas)
        waiting = [asyncio.ensure_future(model.score([ANSWERS[0]])) for _ in range(6)]
        await asyncio.sleep(0.2)
        assert [replica.running for replica in replicas] == [1, 1]
        replicas[1].gate.set()  # the first replica hangs, so the other one executes the remaining calls
        await asyncio.sleep(0.2)
        assert [replica.calls for replica in replicas] == [1, 5]
        replicas[0].gate.set()
        return replicas, await asyncio.gather(*waiting)

    replicas, results = asyncio.run(run())
    assert [replica.max_running for replica in replicas] == [1, 1]
    assert results == [[1.0], *[[2.0]] * 5]


def test_replica_of_canceled_caller_finishes_first():
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
        assert replica.max_running == 1

    asyncio.run(run())


@pytest.mark.defect("lost-reward-model-prevents-restart")
def test_calls_do_not_wait_for_a_hung_replica():
    class HungReplica(Replica):
        async def score(self, conversations: Any) -> list[float]:
            await super().score(conversations)
            raise DeadlineExceeded("reward model 0.score", 5)

    async def run() -> None:
        replica = HungReplica(1.0)
        model = RewardModel([replica])
        waiting = [asyncio.ensure_future(model.score([ANSWERS[0]])) for _ in range(3)]
        await asyncio.sleep(0.2)
        replica.gate.set()
        errors = await asyncio.gather(*waiting, model.score([ANSWERS[0]]), return_exceptions=True)
        assert [type(error) for error in errors] == [RewardModelLost] * 4
        assert [type(cast(RewardModelLost, error).__cause__) for error in errors] == [DeadlineExceeded] * 4
        assert all("reward model 0.score did not finish within 5 s" in str(error) for error in errors)
        assert replica.calls == 1

    asyncio.run(run())
