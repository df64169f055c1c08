"""Grade-school mathematics as a tensordict environment (arXiv:2110.14168)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from skyrl_train.data.reasoning import reasoning_blocks
from skyrl_train.environments.graders.numbers import parse_number
from skyrl_train.environments.tasks.gsm8k import extract_strict_answer
from skyrl_train.tensordict.envs.base import StepCounter, TensorDictEnv, Transform
from skyrl_train.tensordict.envs.chat import DatasetChatEnv
from skyrl_train.tensordict.envs.conversation import last_response, set_texts, text_of
from skyrl_train.tensordict.envs.rewards import add_rewards, answers_in, end

REWARD_KEYS = ("reward_answer", "reward_think", "reward_right", "reward", "success")
SYSTEM_PROMPT = (
    "Solve the problem step by step between <think> and </think>, then give the number that answers it between "
    "<answer> and </answer>."
)
BASE_PROMPT = (
    "A user asks a question and the assistant answers it. The assistant thinks first, between <think> and </think>, "
    "then writes the number that answers the question between <answer> and </answer>. User: %s. Assistant: <think>"
)


SCALES = frozenset({"dozen", "hundred", "thousand", "million", "billion", "k", "m", "percent", "or", "and", "not"})


def given_answer(text: str) -> str | None:
    """Return a response's numeric answer in canonical form; None if there is none, or several that differ.

    It is read from <answer> blocks after the reasoning ("72 clips" is 72), else after "####" (`gsm8k.strict_answer`).
    """
    blocks = answers_in(text)
    if not blocks:
        return extract_strict_answer(text)
    values = {parse_number(block) or _with_unit(block) for block in blocks}
    return values.pop() if len(values) == 1 else None


def _with_unit(block: str) -> str | None:
    """Return the number in front of one word, unless that word is part of the number."""
    head, _, unit = block.strip().removesuffix(".").rpartition(" ")
    return parse_number(head) if unit.isalpha() and unit.lower() not in SCALES else None


def true_answer(answer: str) -> str:
    """Return the number in a row's "answer": after "####", else the whole text. Raises ValueError for no number."""
    truth = parse_number(answer.rpartition("####")[2])
    if truth is None:
        raise ValueError(
            f"The row's answer {answer!r:.80} neither is a number nor ends in '#### <number>'. Correct the row, or "
            "leave it out."
        )
    return truth


class GSM8KRewardParser(Transform):
    """A transform that rewards the model's text of this step by the row's "answer"; the prompt is never examined.

    Writes, each [B, 1, 1]: "reward_answer", 1 for exactly one answer; "reward_think", 1 for exactly one block of
    reasoning; "reward_right", 1 for the right answer; "success", the same as a boolean; and "reward": `correct_reward`
    for the right answer, `format_reward` for another single one, else 0, added to the rewards of other transforms in
    this step.

    Args:
        tokenizer: For tokens mode; the environment's by default.
        in_keys: The key of the row's answer, "answer".
        out_keys: Five other names, in the order above but with "success" last.
        eos_token: Removed from the end of the response first.
        set_done_if_answer: Terminate the episode if the response has an answer.
        input_mode: Only checked: must be the environment's, which decides what is read.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        in_keys: Sequence[str] | None = None,
        out_keys: Sequence[str] | None = None,
        eos_token: str | None = None,
        set_done_if_answer: bool = True,
        input_mode: str | None = None,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
    ):
        self.tokenizer = tokenizer
        self.answer_key = (in_keys or ["answer"])[-1]
        self.out_keys = tuple(out_keys or REWARD_KEYS)
        if len(self.out_keys) != len(REWARD_KEYS):
            raise ValueError(f"out_keys={out_keys!r} must have {len(REWARD_KEYS)} names, which replace {REWARD_KEYS}.")
        self.of_one_step = self.out_keys
        self.eos_token = eos_token
        self.set_done_if_answer = set_done_if_answer
        self.input_mode = input_mode
        self.format_reward, self.correct_reward = format_reward, correct_reward

    def attach(self, environment: TensorDictEnv) -> None:
        """Attach the transform to an environment.

        Raises:
            ValueError: The environment has another `input_mode` than the transform.
        """
        mode = getattr(environment, "input_mode", "text")
        if self.input_mode not in (None, mode):
            raise ValueError(
                f"GSM8KRewardParser: input_mode={self.input_mode!r}, but the environment has {mode!r}. Give both the "
                "same input_mode."
            )
        super().attach(environment)

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        """Add the rewards of the step's responses to `following`, under `out_keys`.

        Raises:
            ValueError: A row lacks the model's response or the expected answer.
        """
        tokenizer = self.tokenizer or getattr(self.environment, "tokenizer", None)
        role = getattr(self.environment, "policy_role", "assistant")
        columns: dict[str, list[float]] = {name: [] for name in self.out_keys}
        for row in root.unbind(0):
            text, answer = last_response(row, tokenizer, role), text_of(row, self.answer_key)
            if text is None or answer is None:
                missing = "the model's response" if text is None else f"the row's {self.answer_key!r}"
                raise ValueError(
                    f"GSM8KRewardParser: {missing} is missing; the row has the keys {sorted(map(str, row.keys()))}. "
                    "The reward needs both the response and the answer."
                )
            for name, value in zip(self.out_keys, self._scores(text, answer), strict=True):
                columns[name].append(value)
        add_rewards(following, columns, total=self.out_keys[3])
        following.set(self.out_keys[4], following[self.out_keys[4]].bool())
        if self.set_done_if_answer:
            end(following, [value > 0 for value in columns[self.out_keys[0]]])
        return following

    def _scores(self, text: str, answer: str) -> tuple[float, float, float, float, float]:
        text = text.removesuffix(self.eos_token) if self.eos_token else text
        thought = float(len(reasoning_blocks(text)) == 1)
        given: str | None
        if self._own_rules:
            thoughts, said = self.extract_tags(text)
            thought, given = float(bool(thoughts)), self.normalize_answer(said) if said else None
            truth = self.normalize_answer(answer.rpartition("####")[2])
        else:
            given, truth = given_answer(text), true_answer(answer)
        right = float(given == truth)
        reward = self.correct_reward if right else self.format_reward if given is not None else 0.0
        return float(given is not None), thought, right, reward, right

    @property
    def _own_rules(self) -> bool:
        """True if a subclass overrides one of TorchRL's two functions, which then decide."""
        own, base = type(self), GSM8KRewardParser
        return own.extract_tags is not base.extract_tags or own.normalize_answer is not base.normalize_answer

    @staticmethod
    def extract_tags(text: str) -> tuple[str, str]:
        """Return the first block of reasoning and the first <answer> after it; "" for a missing one."""
        return next(iter(reasoning_blocks(text)), ""), next(iter(answers_in(text)), "")

    @staticmethod
    def normalize_answer(answer: str) -> str:
        """Return a number without commas, $, %, a final full stop, and trailing decimal zeros: 120.0 becomes 120."""
        plain = answer.strip().translate(str.maketrans("", "", ",$%")).rstrip(".")
        return plain.rstrip("0").rstrip(".") if "." in plain else plain


class GSM8KEnv(DatasetChatEnv):
    """A ChatEnv with a question of GSM8K in every row; an episode has one turn by default (`max_steps`).

    Rows have "question" and "answer" ("... #### 72"); the arguments are DatasetChatEnv's.
    """

    SYSTEM_PROMPT = SYSTEM_PROMPT

    def __init__(
        self,
        *,
        dataset: str | Sequence[Mapping[str, Any]] | Iterable[Mapping[str, Any]] = "openai/gsm8k",
        name: str | None = None,
        split: str | None = None,
        compute_reward: bool = True,
        max_steps: int = 1,
        **settings: Any,
    ):
        if dataset == "openai/gsm8k":
            name, split = name or "main", split or "train"
        settings.setdefault("data_key", "question")
        super().__init__(dataset=dataset, name=name, split=split, **settings)
        self.append_transform(StepCounter(max_steps))
        if compute_reward:
            self.append_transform(GSM8KRewardParser(tokenizer=self.tokenizer))


class GSM8KPrepareQuestion(Transform):
    """A transform that inserts the question into the base prompt, for models without a chat template.

    Reads `in_keys` in every reset and writes `out_keys` (by default the same).
    """

    def __init__(self, in_keys: Sequence[str] | None = None, out_keys: Sequence[str] | None = None):
        sources = list(in_keys or ["text"])
        outs = list(out_keys or sources)
        if len(sources) != len(outs):
            raise ValueError(
                f"in_keys={sources} and out_keys={outs} must have the same length. Give one output key for each input "
                "key."
            )
        self.keys = list(zip(sources, outs, strict=True))

    def before_reset(self, given: TensorDictBase) -> TensorDictBase:
        """Replace each question by the prompt that asks for reasoning and an answer in tags.

        Raises:
            KeyError: A row has no text at one of the input keys.
        """
        for source, out in self.keys:
            questions = [text_of(row, source) for row in given.unbind(0)]
            if None in questions:
                raise KeyError(
                    f"GSM8KPrepareQuestion: the tensordict has no text under {source!r}. Name the column of the "
                    "question with in_keys."
                )
            set_texts(given, out, [BASE_PROMPT % question for question in questions])
        return given
