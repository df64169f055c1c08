"""Over five chat templates: what is trained on is what was sampled, in the context it was sampled in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_train.config.choices import CHAT_TEMPLATES
from skyrl_train.data.batch import collate
from skyrl_train.data.chat import render_prompt, template_rewrites_history
from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.data.messages import Message, Prompt
from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.environments.base import StepOutput
from skyrl_train.rollouts.conversation import ConversationGenerator, RolloutSettings
from skyrl_train.testing.scripted_engine import ScriptedEngine

CONTROLS = {
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "mistral": ("<s>", "[INST]", "[/INST]", "</s>"),
    "qwen3_without_thinking": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
}
"""The first begins a text, the last ends a turn."""
STOP = "</x>"


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A token a byte, words of several bytes (text then has more than one encoding), and the template's controls."""
    alphabet, words = sorted(pre_tokenizers.ByteLevel.alphabet()), ["th", "in", "thin", "ab", "re"]
    vocabulary = {token: index for index, token in enumerate([*CONTROLS[name], *alphabet, *words])}
    merges = [("t", "h"), ("i", "n"), ("th", "in"), ("a", "b"), ("r", "e")]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(CONTROLS[name]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=CONTROLS[name][0],
        eos_token=CONTROLS[name][-1],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


@dataclass(frozen=True)
class Turn:
    """What the model samples, and what is said to it."""

    pieces: tuple[str, ...]
    """Tokens of their own each: not how the tokenizer would encode their text."""
    ending: str
    """end: it ends its turn; stop: with a stop string; cut: neither."""
    observations: tuple[Message, ...]

    def tokens(self, tokenizer: Any) -> list[int]:
        pieces = [*self.pieces, *([STOP] if self.ending == "stop" else [])]
        ids = [id for piece in pieces for id in tokenizer(piece, add_special_tokens=False)["input_ids"]]
        return ids + [tokenizer.eos_token_id] * (self.ending == "end")


def texts() -> st.SearchStrategy[str]:
    spelt = st.sampled_from(
        ["<|im_end|>", "<|eot_id|>", "</s>[INST]", "<end_of_turn>\n", "<think>", "</think>", " ", "\n"]
    )
    return st.lists(st.one_of(spelt, st.text(max_size=5)), max_size=4).map("".join)


def messages(roles: tuple[str, ...]) -> st.SearchStrategy[tuple[Message, ...]]:
    one = st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(roles), texts())
    return st.lists(one, min_size=1, max_size=2).map(tuple)


PIECES = st.lists(
    st.sampled_from(["t", "h", "in", "a", "b", "ab", "re", " ", "\n", "é", "<think>", "</think>", "<|im_end|"]),
    max_size=6,
)
TURNS = st.lists(
    st.builds(Turn, PIECES.map(tuple), st.sampled_from(["end", "stop", "cut"]), messages(("user", "tool"))),
    min_size=1,
    max_size=6,
)


class Model(ScriptedEngine):
    """Samples the script, turn by turn, and remembers what it read."""

    def __init__(self, script: Sequence[Turn], tokenizer: Any):
        super().__init__(lambda request: script[self._turn(request)].tokens(tokenizer))
        self.script = script
        self.read: list[list[int]] = []

    def _turn(self, request: SampleRequest) -> int:
        return len(self.read) - 1

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        (request,) = requests
        self.read.append(list(request.token_ids))
        (done,) = await super().generate(requests)
        ending = self.script[self._turn(request)].ending
        logprobs = -1.0 - np.arange(len(done.token_ids), dtype=np.float32)
        by = STOP if ending == "stop" else None
        reason = "length" if ending == "cut" else "stop"
        return [replace(done, stop_text=by, stop_reason=reason, full_logprobs=logprobs)]


class Environment:
    def __init__(self, script: Sequence[Turn], knows_tools: bool):
        self.role = {} if knows_tools else {"role": "user"}
        self.messages: list[Message] = [{"role": "user", "content": "go <|im_end|>"}]
        self.script = script
        self.turns = 0

    async def start(self, env_class: str, prompt: Prompt) -> Environment:
        return self

    async def step(self, text: str) -> StepOutput:
        turn = self.script[self.turns]
        self.turns += 1
        return StepOutput([message | self.role for message in turn.observations], 1.0, self.turns == len(self.script))

    async def close(self) -> None: ...


def episode(name: str, script: Sequence[Turn], **options: Any) -> tuple[Trajectory, Model]:
    tokenizer = tokenizer_of(name)
    model = Model(script, tokenizer)
    options = {"max_turns": 6, "max_input_length": 10**6, "rollout_s": 60.0} | options
    settings = RolloutSettings(SamplingParams(100, stop=(STOP,)), 1, 3, **options)
    client = EngineClient([model], deadline_s=60.0)
    environment = Environment(script, name not in ("gemma", "mistral"))
    generator = ConversationGenerator(client, environment, tokenizer, settings)  # type: ignore[arg-type]
    group = asyncio.run(generator.rollout(Prompt("0", [], "toy"), 0))
    return group.trajectories[0], model


@given(st.sampled_from(sorted(CONTROLS)), TURNS, st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_trained_ids_and_contexts_are_exact(
    name: str, script: list[Turn], ends: bool, retokenize: bool
):
    rewrites = name == "qwen3_without_thinking"
    retokenize = retokenize and rewrites
    item, model = episode(
        name,
        script,
        append_eos_token_after_stop_str_in_multi_turn=ends,
        step_wise_trajectories=rewrites,
        retokenize_chat_history=retokenize,
    )
    sampled = [turn.tokens(tokenizer_of(name)) for turn in script]

    assert item.status == OK and len(item.turns) == len(script)
    spans = {place for turn in item.turns for place in range(turn.start, turn.stop)}
    assert sampled == [item.response_ids[turn.start : turn.stop].tolist() for turn in item.turns]
    assert item.loss_mask.tolist() == [int(place in spans) for place in range(len(item.response_ids))]
    assert item.logprobs.tolist() == [
        -1.0 - (_place(item, i)) if i in spans else 0.0 for i in range(len(item.response_ids))
    ]
    # every turn stands, in the batch, after exactly what the model had read
    batch = collate_one(item)
    for turn, read, said in zip(item.turns, model.read, sampled, strict=True):
        if not said:
            continue
        row, place = _row(item, turn.start)
        assert batch[row][: place + len(said)] == read + said
    assert item.loss_mask[-1:].tolist() in ([1], []) or not sampled[-1]


def _place(item: Trajectory, index: int) -> int:
    return next(index - turn.start for turn in item.turns if turn.start <= index < turn.stop)


def _row(item: Trajectory, start: int) -> tuple[int, int]:
    """The sequence that a response token is in, and where in it."""
    rows = list(item.sequences())
    row = max(index for index, (_, first, _) in enumerate(rows) if first <= start)
    prompt, first, _ = rows[row]
    return row, len(prompt) + start - first


def collate_one(item: Trajectory) -> list[list[int]]:
    batch = collate([TrajectoryGroup(item.prompt, [item])])
    return [ids.tolist() for ids in batch.input_ids.tensor_split(batch.offsets[1:-1])]


@given(st.sampled_from(["chatml", "llama3", "gemma", "mistral"]), TURNS)
@settings(max_examples=30, deadline=None)
def test_context_equals_template_without_stop_strings(name: str, script: list[Turn]):
    """Where sampled text is what the tokenizer would make of it, and nothing has blanks to be trimmed."""
    plain = [Turn(("ok",), "end", turn.observations) for turn in script]
    item, model = episode(name, plain)
    tokenizer = tokenizer_of(name)
    ends = [place for place, message in enumerate(item.messages) if message["role"] == "assistant"]
    written = [render_prompt(tokenizer, item.messages[:end]) for end in ends]
    if name == "mistral":  # its template has a blank before an answer, which this model does not write
        blank = tokenizer(" ", add_special_tokens=False)["input_ids"]
        read = [[id for id in ids if [id] != blank] for ids in model.read]
        written = [[id for id in ids if [id] != blank] for ids in written]
        assert read == written
    else:
        assert model.read == written


def test_history_rewriting_templates_are_detected():
    assert [name for name in CONTROLS if template_rewrites_history(tokenizer_of(name))] == ["qwen3_without_thinking"]


def test_the_names_of_templates_are_those_that_configuration_knows():
    assert tuple(TEMPLATES) == CHAT_TEMPLATES
