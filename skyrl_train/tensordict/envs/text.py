"""Transforms between text, tokens and conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torchrl.data import Bounded, Composite, NonTensor
from torchrl.envs import Compose, Transform
from torchrl.envs.llm.transforms import (
    IncrementalTokenizer as _IncrementalTokenizer,
    TemplateTransform as _TemplateTransform,
    Tokenizer as _Tokenizer,
)

from skyrl_train.data.chat import is_control_token, render_continuation, render_prompt, render_text
from skyrl_train.data.messages import Message
from skyrl_train.tensordict.containers import Tokens
from skyrl_train.tensordict.envs.conversation import full_messages, is_continued, messages_of, unpadded
from skyrl_train.tensordict.envs.rows import add_spec, chat_setting, rows_of
from skyrl_train.tensordict.history import rendered_form, template_options
from skyrl_train.tensordict.ragged import nested_stack
from skyrl_train.tensordict.wrappers.outputs import decoded

HEADER = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


class Tokenizer(_Tokenizer):  # type: ignore[misc]
    """TorchRL's transform, which encodes text under `in_keys`, and decodes ids of actions under `out_keys_inv`.

    Unlike TorchRL's, it also encodes rows of different lengths without padding, decodes the rows of ragged actions
    without padding, and keeps special tokens that mark reasoning when it skips the others.
    """

    def call_tokenizer_fn(self, value: str | list[str]) -> Any:
        """Return the ids of a text or of a list of texts, and their mask if `return_attention_mask`."""
        if isinstance(value, str) or self.padding or self.max_length is not None:
            return super().call_tokenizer_fn(value)
        rows = [super(Tokenizer, self).call_tokenizer_fn(text) for text in value]
        if not self.return_attention_mask:
            return _ragged(rows)
        return _ragged([ids for ids, _ in rows]), _ragged([mask for _, mask in rows])

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for text_key, ids_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            rows = [row.get(ids_key, None) for row in (tensordict.unbind(0) if tensordict.batch_dims else [tensordict])]
            if any(ids is None for ids in rows):
                if not self.missing_tolerance:
                    raise KeyError(
                        f"Tokenizer: the tensordict has no key {ids_key!r}. Name that of ids in out_keys_inv."
                    )
                continue
            skips = self.skip_special_tokens
            texts = [NonTensorData(decoded(self.tokenizer, ids.flatten().tolist(), skips)) for ids in rows]
            tensordict.set(text_key, NonTensorStack(*texts) if tensordict.batch_dims else texts[0])
        return tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec of observations with the keys that the transform adds; it may change the one given."""
        spec = super().transform_observation_spec(observation_spec)
        for key in self.out_keys:
            spec[key] = _ids_spec(self.tokenizer, spec)
        return spec


class IncrementalTokenizer(_IncrementalTokenizer):  # type: ignore[misc]
    """A transform that keeps ("tokens", "prompt") in sync with a history: the chat template's ids of its prompt.

    After a step, they are the ids that the step actually had (("tokens", "full"), without padding), the end of the
    turn, later messages of tools and others, and the header of the next answer: sampled tokens are never tokenized
    again. If the template rewrites earlier turns, or the policy gave no ids, the whole conversation is rendered anew.

    At the next reset or step it moves behind transforms that were appended after it, because they may add messages,
    unless one of them has `tokens_key` in its `in_keys`.

    Args:
        tokenizer: Hugging Face tokenizer with a chat template.
        history_key: Key of the conversation's History.
        tokens_key: Key of the ids; those of a step are at "full" in the same container.
        chat_template_name, chat_template: A template instead of the tokenizer's own.
        add_generation_prompt: Only True.
        template_kwargs: Further variables of the template.
    """

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
        template = {"chat_template_name": chat_template_name, "chat_template": chat_template}
        key = unravel_key(tokens_key)
        super().__init__(tokenizer, history_key=history_key, tokens_key=key, **template)
        self._in_tokens = isinstance(key, tuple) and len(key) == 2 and key[1] == "prompt"
        options = template_options(tokenizer, chat_template, chat_template_name)
        self.template_kwargs = {**options, **(template_kwargs or {})}

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Move to the end of the environment's transforms. Compose calls the hooks before a step in reverse order."""
        chain = getattr(self.container, "transform", None)
        if not isinstance(chain, Compose) or self not in (parts := list(chain)):
            return tensordict
        place = parts.index(self)
        later = [part for part in parts[place + 1 :] if not isinstance(part, IncrementalTokenizer)]
        if later and not any(self.tokens_key in part.in_keys for part in later):
            chain.pop(place)
            self.reset_parent()
            chain.append(self)
        return tensordict

    _reset_env_preprocess = _inv_call

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        rows = rows_of(tensordict_reset)
        for row in rows:
            if (history := row.get(self.history_key, None)) is not None:
                self._set(row, self._rendered(messages_of(history)))
        return nested_stack(rows, tensordict_reset.batch_size)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = rows_of(next_tensordict)
        for before, row in zip(rows_of(tensordict), rows, strict=True):
            if row.get(self.history_key, None) is not None:
                self._set(row, self._ids(before, row))
        return nested_stack(rows, next_tensordict.batch_size)

    def _ids(self, before: TensorDictBase, after: TensorDictBase) -> list[int]:
        written = messages_of(after.get(self.history_key))
        messages, role = rendered_form(written), self._role()
        key = self.tokens_key
        full = before.get((*(key[:-1] if isinstance(key, tuple) else (key,)), "full"), None)
        answered = rendered_form(full_messages(before, role) or [])
        if full is not None and answered and messages[: len(answered)] == answered:
            ids = unpadded(before, full, response=False).tolist()
            places = [place for place, message in enumerate(messages) if message["role"] in (role, "assistant")]
            more = render_continuation(self.tokenizer, messages, places, self.template_kwargs) if places else None
            if more is not None:
                ended = more and more[:1] == ids[-1:] and is_control_token(self.tokenizer, more[0])
                return ids + (more[1:] if ended else more)  # the model may have ended its turn itself
        return self._rendered(written)

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        goes_on = is_continued(messages, self._role())
        messages = rendered_form(messages)
        return render_prompt(self.tokenizer, messages, self.template_kwargs, continue_final_message=goes_on)

    def _role(self) -> Any:
        return chat_setting(self, "policy_role", "assistant")

    def _set(self, row: TensorDictBase, ids: list[int]) -> None:
        key = self.tokens_key
        if self._in_tokens:
            row.set(key[0], Tokens(prompt=torch.tensor(ids), padded=False, batch_size=[]))
        else:
            row.set(key, torch.tensor(ids))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        key, spec = self.tokens_key, _ids_spec(self.tokenizer, observation_spec)
        if self._in_tokens:
            add_spec(observation_spec, key, spec, Tokens)
            padded = NonTensor(observation_spec.shape, example_data=False)
            add_spec(observation_spec, (key[0], "padded"), padded, Tokens)
        else:
            observation_spec[key] = spec
        return observation_spec


class TemplateTransform(_TemplateTransform):  # type: ignore[misc]
    """A transform that adds Llama 3's headers to an environment's "message", and removes them from a policy's "action".

    A reply is everything between its header (if any) and the first <|eot_id|> (if any), including the text before that
    token in its line.

    Args:
        tokenizer: Tokenizer whose chat template renders messages; None writes Llama 3's headers.
        chat_template: A template instead of the tokenizer's own.
    """

    def __init__(self, tokenizer: Any = None, chat_template: str | None = None):
        Transform.__init__(self, ["message"], ["message"], ["action"], ["action"])
        self.tokenizer, self.chat_template = tokenizer, chat_template

    def wrapped(self, text: str) -> str:
        """Return `text` as a turn of the user, followed by the header of the assistant's answer."""
        if self.tokenizer is not None:
            options = {"chat_template": self.chat_template} if self.chat_template else {}
            return render_text(self.tokenizer, [{"role": "user", "content": text}], options)
        start, end, stop = HEADER
        return f"{start}user{end}\n\n{text}{stop}{start}assistant{end}\n\n"

    def unwrapped(self, text: str) -> str:
        """Return the text of a reply without its header and end token."""
        start, end, stop = HEADER
        said = text.partition(stop)[0]
        if said.lstrip().startswith(start):
            said = said.partition(end)[2]
        return said.strip("\n")

    def _apply_transform(self, message: Any) -> Any:
        return _mapped(self.wrapped, message)

    def _inv_apply_transform(self, action: Any) -> Any:
        return _mapped(self.unwrapped, action)


def _mapped(change: Callable[[str], str], value: Any) -> Any:
    """Apply a function to a string, or to every string of a NonTensorStack."""
    if isinstance(value, NonTensorStack):
        return NonTensorStack(*(_mapped(change, part) for part in value.unbind(0)))
    if isinstance(value, NonTensorData):
        return NonTensorData(change(value.data), batch_size=value.batch_size)
    return change(value)


def _ragged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({row.shape for row in rows}) == 1:
        return torch.stack(list(rows))
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def _ids_spec(tokenizer: Any, spec: Composite) -> Bounded:
    """Return the spec of ids [*, L]; `vocab_size` of a tokenizer does not count added tokens."""
    return Bounded(0, len(tokenizer), shape=(*spec.shape, -1), device=spec.device, dtype=torch.int64)
