"""Labelled examples, chats or prompts with completions, as sequences with the loss on the answers.

The losses are those of TRL's `SFTTrainer`: `assistant_only_loss` for chats, `completion_only_loss` for completions.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from .packing import IGNORED_LABEL
from .tokens import text_ids

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class LabelledExamples(Dataset[dict[str, Tensor]]):
    """One sequence for each example, however long: `{"input_ids": (n,), "labels": (n,)}`, int64; labels are -100
    except on what the model must answer, and the model shifts them. `PaddingCollator` makes batches of them.

    An example has one of two forms:

    - `messages`, a list of `{"role": ..., "content": ...}`, with the tokenizer's chat template; labels are on what the
      template has between `{% generation %}` and `{% endgeneration %}`.
    - `prompt` and `completion`, two texts; labels are on the completion and the end token after it. Before the prompt
      stand the special tokens that the tokenizer puts there. Two lists of messages are taken, too, with labels on all
      that the chat template makes of the completion.

    `tools` and `chat_template_kwargs`, if there, go to the chat template.

    Args:
        examples: Mappings, such as a `datasets.Dataset`.
        tokenizer: The tokenizer; for chats a fast one, whose template marks the answers.

    Attributes:
        item_lengths: Tokens of each sequence, by which trainers group them.
        longest: Tokens of the longest sequence.

    Raises:
        ValueError: for examples of another form or without an answer, with the number of the example; for a prompt
            whose end is one token with the completion; and for a tokenizer that cannot say where answers are.
    """

    def __init__(self, examples: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> None:
        self._rows: list[tuple[Tensor, Tensor]] = []  # token ids, int32, and whether they are answers
        digest = hashlib.blake2b(digest_size=8)
        for index, example in enumerate(logging.tqdm(examples, desc="Tokenizing", unit="examples", disable=None)):
            try:
                ids, answers = _encoded(example := _without_none(example), tokenizer)
                if not any(answers[1:]):
                    roles = ", ".join(sorted({message["role"] for message in example.get("messages") or ()}))
                    raise ValueError(f"it has no answer to learn{roles and f' among its roles ({roles})'}: remove it")
            except ValueError as error:
                raise ValueError(f"example {index}: {str(error).rstrip('.')}.") from error
            row = torch.tensor(ids, dtype=torch.int32), torch.tensor(answers, dtype=torch.bool)
            self._rows.append(row)
            for part in row:
                digest.update(part.numpy().tobytes())
        if not self._rows:
            raise ValueError("there is no example; give some")
        self.item_lengths = [len(ids) for ids, _ in self._rows]
        self.longest = max(self.item_lengths)
        self.resume_record = {"digest": digest.hexdigest()}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, answers = self._rows[index]
        return {"input_ids": ids.long(), "labels": ids.long().masked_fill(~answers, IGNORED_LABEL)}


def _without_none(value: Any) -> Any:
    """A value without keys of the value None, which `datasets` adds where other examples have them."""
    if isinstance(value, Mapping):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _encoded(example: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Token ids of an example, and whether each is part of an answer."""
    columns = set(example)
    if columns & {"messages", "prompt", "completion"} == {"messages"}:
        return _chat(example, tokenizer)
    if columns & {"messages", "prompt", "completion"} != {"prompt", "completion"}:
        raise ValueError(f"its columns are {sorted(columns)}, but must be messages, or prompt and completion")
    prompt, completion = example["prompt"], example["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no end token to put after the completion: set tokenizer.eos_token (for "
                "the command line in a copy, tokenizer.save_pretrained(FOLDER), and --tokenizer FOLDER)"
            )
        before, whole = text_ids(tokenizer, prompt), text_ids(tokenizer, prompt + completion)
        whole += [tokenizer.eos_token_id] if whole[-1:] != [tokenizer.eos_token_id] else []
        remedy = "move the space or word at the end of the prompt to the beginning of the completion"
    elif isinstance(prompt, list) and isinstance(completion, list):
        before = _templated(prompt, example, tokenizer, add_generation_prompt=True)["input_ids"]
        whole = _templated([*prompt, *completion], example, tokenizer)["input_ids"]
        remedy = "give the whole chat as messages"
    else:
        raise ValueError("its prompt and completion must be two texts, or two lists of messages")
    if whole[: len(before)] != before:
        raise ValueError(f"the tokens of its prompt are others where the completion follows: {remedy}")
    return whole, [place >= len(before) for place in range(len(whole))]


def _chat(example: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[bool]]:
    if tokenizer.chat_template and not _MARKS.search(tokenizer.get_chat_template(tools=example.get("tools"))):
        raise ValueError(
            "the chat template does not say which tokens are answers: put {% generation %} and {% endgeneration %} "
            "around them in chat_template.jinja of the tokenizer (trl.get_training_chat_template has such templates "
            "for known models), or give prompt and completion"
        )
    [text], [answers] = _templated(example["messages"], example, tokenizer, return_assistant_tokens_mask=True)
    # `assistant_masks` before Transformers 5.24 go on to the end where no token holds the last character of an answer
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    in_answer = bytearray(len(text))
    for first, last in answers:
        in_answer[first:last] = b"\1" * (last - first)
    return encoded["input_ids"], [any(in_answer[first:last]) for first, last in encoded["offset_mapping"]]


def _templated(messages: Any, example: Mapping[str, Any], tokenizer: Any, **options: Any) -> Any:
    """What the chat template makes of messages: tokens, or texts and places of answers with a mask of answers."""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give one that has, or prompt and completion as texts")
    if not messages or not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        raise ValueError(f'a chat must be a list of {{"role": ..., "content": ...}}, but it is {messages!r:.80}')
    template = tokenizer.get_chat_template(tools=example.get("tools"))
    for role in (one.get("role") for one in messages):
        if role not in _ROLES and not re.search(rf"""(['"]){re.escape(str(role))}\1""", template):
            raise ValueError(
                f"a message has the role {role!r}, but must have one of {', '.join(_ROLES)}, or another that the chat "
                "template names: correct it, or the template"
            )
    if any("weight" in message for message in messages):
        raise ValueError("a message has a weight, but all answers of a chat count the same: leave weights out")
    tools = example.get("tools")
    options |= {"tools": json.loads(tools) if isinstance(tools, str) else tools}
    options |= example.get("chat_template_kwargs") or {}
    try:
        if options.get("return_assistant_tokens_mask"):
            return render_jinja_template([messages], chat_template=template, **tokenizer.special_tokens_map | options)
        # a sequence may be longer than the tokenizer's model_max_length, of which it warns
        return tokenizer.apply_chat_template(
            messages, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses it ({error})") from error
