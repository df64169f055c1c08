"""A JsonConstraint allows exactly the tokens with which a response can still become JSON of its schema."""

from __future__ import annotations

import pytest

from skyrl_train.engines import json_constraint
from skyrl_train.engines.json_constraint import JsonGrammars
from skyrl_train.errors import UnsupportedParameter
from skyrl_train.testing.tiny_models import byte_tokenizer

pytestmark = pytest.mark.skipif(not json_constraint.is_available(), reason="llguidance is not installed")
TOKENIZER = byte_tokenizer()
VOCAB_SIZE = 320
END = sorted(TOKENIZER.get_vocab()[token] for token in ("<|endoftext|>", "<|im_end|>"))


@pytest.fixture(scope="module")
def grammars() -> JsonGrammars:
    return JsonGrammars("e", TOKENIZER, VOCAB_SIZE, [*END, VOCAB_SIZE + 5])


def test_allowed_tokens_continue_the_json(grammars: JsonGrammars):
    constraint = grammars.start('{"enum": ["ab", 12]}')
    steps = []
    for token in TOKENIZER.encode('"ab"', add_special_tokens=False):
        allowed = (~constraint.forbidden()).nonzero().flatten().tolist()
        steps.append(str(TOKENIZER.decode(sorted(allowed))))
        constraint.accept(token)
    assert steps == ['"1', "a", "b", '"']
    assert (~constraint.forbidden()).nonzero().flatten().tolist() == END


def test_unsupported_schema_is_rejected_by_keyword(grammars: JsonGrammars):
    grammars.check('{"type": "object", "additionalProperties": {"type": "integer"}}')
    with pytest.raises(UnsupportedParameter, match=r"Engine 'e' does not support this json_schema: .*uniqueItems"):
        grammars.check('{"type": "array", "uniqueItems": true}')


def test_tokenizer_that_is_not_fast_is_rejected():
    with pytest.raises(UnsupportedParameter, match="Only fast tokenizers"):
        JsonGrammars("e", ["not", "a", "tokenizer"], VOCAB_SIZE, END).check("{}")
