"""Transforms between text, tokens and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey

from skyrl_train.data.chat import decode_response, is_control_token, render_continuation, render_prompt, render_text
from skyrl_train.data.messages import Message
from skyrl_train.tensordict.containers import Tokens
from skyrl_train.tensordict.envs.base import Transform
from skyrl_train.tensordict.envs.conversation import (
    full_messages,
    is_continued,
    messages_of,
    part,
    set_texts,
    text_of,
    unpadded,
)
from skyrl_train.tensordict.history import rendered_form, template_options

HEADER = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


class Tokenizer(Transform):
    """A transform that encodes text under `in_keys` to ids, and decodes ids of actions under `in_keys_inv` to text.

    Ids [B, L] are padded on the tokenizer's side; the mask is at (*root of the out key, "attention_mask"). Without
    `padding`, every row has its own length, and the tensordict must be a lazy stack if lengths differ.

    Args:
        tokenizer: A Hugging Face tokenizer, or the name of one.
        skip_special_tokens: Decode ids without special tokens, except those that mark reasoning.
        missing_tolerance: Ignore missing keys, which otherwise raise KeyError.
        additional_tokens: Added to the tokenizer.
        call_before_reset: Tokenize the input of a reset before the environment sees it.
        use_raw_nontensor: Accepted without effect, for compatibility with TorchRL.
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] = (),
        out_keys: Sequence[NestedKey] = (),
        in_keys_inv: Sequence[NestedKey] = (),
        out_keys_inv: Sequence[NestedKey] = (),
        *,
        tokenizer: Any,
        use_raw_nontensor: bool = False,
        additional_tokens: Sequence[str] | None = None,
        skip_special_tokens: bool = True,
        add_special_tokens: bool = False,
        padding: bool = True,
        max_length: int | None = None,
        return_attention_mask: bool = True,
        missing_tolerance: bool = True,
        call_before_reset: bool = False,
    ):
        for name, keys, outs in (("", in_keys, out_keys), ("_inv", in_keys_inv, out_keys_inv)):
            if len(keys) != len(outs):
                raise ValueError(
                    f"in_keys{name} has {len(keys)} keys, out_keys{name} {len(outs)}. Give as many of both."
                )
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        if additional_tokens:
            tokenizer.add_tokens(list(additional_tokens))
        self.tokenizer = tokenizer
        self.keys = list(zip(in_keys, out_keys, strict=True))
        self.keys_inv = list(zip(in_keys_inv, out_keys_inv, strict=True))
        self.skip_special_tokens, self.add_special_tokens = skip_special_tokens, add_special_tokens
        self.padding, self.max_length = padding, max_length
        self.return_attention_mask, self.missing_tolerance = return_attention_mask, missing_tolerance
        self.call_before_reset = call_before_reset

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return `tensordict`, [B] or [], with the ids added."""
        for source, out in self.keys:
            if source not in tensordict.keys(include_nested=True):
                self._missing(source)
                continue
            value = tensordict[source]
            texts = [value] if isinstance(value, str) else list(value)
            ids, mask = self._encoded([str(text) for text in texts])
            root = out[:-1] if isinstance(out, tuple) else ()
            _set_rows(tensordict, out, ids)
            if self.return_attention_mask:
                _set_rows(tensordict, (*root, "attention_mask"), mask)
        return tensordict

    def before_reset(self, given: TensorDictBase) -> TensorDictBase:
        return self.forward(given) if self.call_before_reset else given

    def after_reset(self, given: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        return root if self.call_before_reset else self.forward(root)

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        return self.forward(following)

    def before_step(self, root: TensorDictBase) -> TensorDictBase:
        for source, out in self.keys_inv:
            if source not in root.keys(include_nested=True):
                self._missing(source)
                continue
            rows = [row.get(source).tolist() for row in root.unbind(0)]
            decode = partial(decode_response, self.tokenizer) if self.skip_special_tokens else self.tokenizer.decode
            set_texts(root, out, [str(decode(ids)) for ids in rows])
        return root

    def _missing(self, key: NestedKey) -> None:
        if not self.missing_tolerance:
            raise KeyError(f"Tokenizer: the tensordict has no key {key!r}. Name the text's key with in_keys.")

    def _encoded(self, texts: list[str]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return ids and mask of every text."""
        cut = {} if self.max_length is None else {"max_length": self.max_length, "truncation": True}
        padding = ("max_length" if self.max_length else True) if self.padding else False
        found = self.tokenizer(texts, add_special_tokens=self.add_special_tokens, padding=padding, **cut)
        return [torch.tensor(ids) for ids in found["input_ids"]], [
            torch.tensor(m).bool() for m in found["attention_mask"]
        ]


def _set_rows(tensordict: TensorDictBase, key: NestedKey, values: Sequence[torch.Tensor]) -> None:
    """Write a value for every row of [B], or the only one of []."""
    if tensordict.batch_dims == 0:
        tensordict.set(key, values[0])
    elif len({value.shape for value in values}) == 1:
        tensordict.set(key, torch.stack(list(values)))
    elif isinstance(tensordict, LazyStackedTensorDict):
        for row, value in zip(tensordict.unbind(0), values, strict=True):
            row.set(key, value)
    else:
        raise ValueError("Tokenizer: rows of different lengths need padding=True or a lazy stack.")


class IncrementalTokenizer(Transform):
    """A transform that keeps ("tokens", "prompt") in sync with a history: the chat template's ids of its prompt.

    After a step, they are the ids that the step actually had (("tokens", "full"), without padding), the end of the
    turn, later messages of tools and others, and the header of the next answer: sampled tokens are never tokenized
    again. If the template rewrites earlier turns, or the policy gave no ids, the whole conversation is rendered anew.
    It runs after all other transforms.
    """

    last = True

    def __init__(
        self,
        tokenizer: Any,
        *,
        history_key: NestedKey = ("history", "prompt"),
        tokens_key: NestedKey = ("tokens", "prompt"),
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        if not add_generation_prompt:
            raise ValueError(
                "add_generation_prompt=False is not supported: the next answer follows ('tokens', 'prompt')."
            )
        if (history_key, tokens_key) != (("history", "prompt"), ("tokens", "prompt")):
            raise ValueError(
                "IncrementalTokenizer only supports history_key=('history', 'prompt'), tokens_key=('tokens', 'prompt')."
            )
        self.tokenizer = tokenizer
        self.template_kwargs = {
            **template_options(tokenizer, chat_template, chat_template_name),
            **(template_kwargs or {}),
        }

    def after_reset(self, given: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        rows = []
        for row in root.unbind(0):
            rows.append(self._with(row, self._rendered(messages_of(part(row, "history", "prompt")))))
        return lazy_stack(rows)

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        pairs = zip(root.unbind(0), following.unbind(0), strict=True)
        return lazy_stack([self._with(after, self._ids(before, after)) for before, after in pairs])

    def _ids(self, before: TensorDictBase, after: TensorDictBase) -> list[int]:
        written = messages_of(part(after, "history", "prompt"))
        messages = rendered_form(written)
        role = getattr(self.environment, "policy_role", "assistant")
        full, answered = part(before, "tokens", "full"), rendered_form(full_messages(before, role) or [])
        if full is not None and answered and messages[: len(answered)] == answered:
            ids = unpadded(before, full, response=False).tolist()
            places = [place for place, message in enumerate(messages) if message["role"] in (role, "assistant")]
            continuation = (
                render_continuation(self.tokenizer, messages, places, self.template_kwargs) if places else None
            )
            if continuation is not None:
                if (
                    continuation
                    and ids
                    and is_control_token(self.tokenizer, continuation[0])
                    and ids[-1] == continuation[0]
                ):
                    continuation = continuation[1:]  # the model already ended its turn
                return ids + continuation
        return self._rendered(written)

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        goes_on = is_continued(messages, getattr(self.environment, "policy_role", "assistant"))
        messages = rendered_form(messages)
        return render_prompt(self.tokenizer, messages, self.template_kwargs, continue_final_message=goes_on)

    def _with(self, row: TensorDictBase, ids: list[int]) -> TensorDictBase:
        return row.set("tokens", Tokens(prompt=torch.tensor(ids), padded=False, batch_size=[]))


class TemplateTransform(Transform):
    """A transform that adds Llama 3's headers to an environment's "message", and removes them from a policy's "action".

    A reply is everything between its header (if any) and the first <|eot_id|> (if any), including the text before that
    token in its line.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        in_keys: Sequence[str] = ("message",),
        out_keys: Sequence[str] = ("message",),
        in_keys_inv: Sequence[str] = ("action",),
        out_keys_inv: Sequence[str] = ("action",),
        role: str = "user",
        chat_template: str | None = None,
    ):
        self.tokenizer, self.role, self.chat_template = tokenizer, role, chat_template
        self.keys = list(zip(in_keys, out_keys, strict=True))
        self.keys_inv = list(zip(in_keys_inv, out_keys_inv, strict=True))

    def wrapped(self, text: str) -> str:
        """Return `text` as a turn of `role`, followed by the header of the assistant's answer."""
        if self.tokenizer is not None:
            options = {"chat_template": self.chat_template} if self.chat_template else {}
            messages = [{"role": self.role, "content": text}]
            return render_text(self.tokenizer, messages, options)
        start, end, stop = HEADER
        return f"{start}{self.role}{end}\n\n{text}{stop}{start}assistant{end}\n\n"

    def unwrapped(self, text: str) -> str:
        """Return the text of a reply without its header and end token."""
        start, end, stop = HEADER
        said = text.partition(stop)[0]
        if said.lstrip().startswith(start):
            said = said.partition(end)[2]
        return said.strip("\n")

    def after_reset(self, given: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        return self._apply(root, self.keys, self.wrapped)

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        said = {out: [text_of(row, out) for row in root.unbind(0)] for _, out in self.keys}
        for source, out in self.keys:
            texts = [text_of(row, source) for row in following.unbind(0)]
            if None not in texts and texts != said[out]:  # otherwise the environment gave no new message
                pairs = zip(texts, said[out], strict=True)
                wrapped = [str(text) if text == old else self.wrapped(str(text)) for text, old in pairs]
                set_texts(following, out, wrapped)
        return following

    def before_step(self, root: TensorDictBase) -> TensorDictBase:
        return self._apply(root, self.keys_inv, self.unwrapped)

    def _apply(self, tensordict: TensorDictBase, keys: Sequence[tuple[str, str]], change: Any) -> TensorDictBase:
        for source, out in keys:
            texts = [text_of(row, source) for row in tensordict.unbind(0)]
            if None not in texts:
                set_texts(tensordict, out, [change(text) for text in texts])
        return tensordict
