from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.build.learner import check_same_tokens
from skyrl_train.errors import ConfigError
from skyrl_train.testing.tiny_models import byte_tokenizer


def tokenizer_in(folder: Path, *more: str) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(more))
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_reference_may_know_more_tokens_than_the_policy(tmp_path: Path) -> None:
    policy, other = tokenizer_in(tmp_path / "policy"), tokenizer_in(tmp_path / "other", "<extra>")
    check_same_tokens(policy, other, "trainer.ref.model.path")


def test_a_reference_that_lacks_a_token_of_the_policy_is_refused(tmp_path: Path) -> None:
    policy, other = tokenizer_in(tmp_path / "policy", "<extra>"), tokenizer_in(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"trainer\.ref\.model\.path=.*: 1 tokens .* '<extra>'"):
        check_same_tokens(policy, other, "trainer.ref.model.path")


def test_a_model_is_not_compared_with_itself() -> None:
    check_same_tokens("no folder", "no folder", "trainer.ref.model.path")
