"""The model class `lengthgen` of lm-evaluation-harness: reads in chunks, and shared prefixes of requests once.

Results are those of lm_eval's own class for Transformers (`hf`) on the same weights, up to rounding, except that

- nothing is truncated on the left (`hf` truncates to `max_length`, 2,048 for a config without a length);
- `loglikelihood_rolling` reads a document as one stream, while `hf` cuts it into windows of `max_length` tokens and
  forgets at each border;
- what the tokenizer puts before a text stands there once, and before texts without context, too, and is not scored;
  `hf` scores it before a document, after a beginning (or end) of text, which alone stands before an empty context;
- a tokenizer that appends an end of text to each text (ByT5's) does not do so here; `hf` counts that token as context;
- each generated text, and each beam, ends by its own tokens, as a single text does with `hf`. In batches, `hf`
  continues until all rows hold a stop string, which can change answers.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from hf_recurrent_lengthgen.checkpoints.loading import load_language_model, load_tokenizer
from hf_recurrent_lengthgen.data.tokens import text_ids, text_prefix
from hf_recurrent_lengthgen.evaluation.readers import StateReader, check_generation, chunk_prompts, entropy, reader_of
from hf_recurrent_lengthgen.evaluation.shared_prefixes import (
    Branch,
    prefix_tree,
    read_tree,
    rows_with_room,
    tokens_to_read,
)
from hf_recurrent_lengthgen.evaluation.streaming import evaluation_mode, forward_plan
from hf_recurrent_lengthgen.harness.endings import BrokenLogits, Ending

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
GENERATION_ARGUMENTS = {"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "num_beams"}
"""Arguments for `generate`. Penalties for repetition require the prompt, which has been read already."""
ROW_LENGTH = 64
"""Tokens of a row, by which the rows of a batch are as many as memory limits allow."""
QUESTION, MAX_GENERATED = 128, 256
"""Default numbers of tokens: of a question, which in LongBench has up to about 100, and to generate, as in lm_eval."""

Ids = list[int]
Request = tuple[tuple[str, str], Ids, Ids]


@register_model("lengthgen")
class StateLM(TemplateLM):
    """A recurrent model or a hybrid whose state is a value, so that several texts can continue what it has read.

    Args:
        pretrained: Checkpoint folder, Hub name, or a model; a hybrid of Transformers after `stateful(model)`.
        tokenizer: Folder, Hub name, "bytes", or a tokenizer (default: the checkpoint's).
        batch_size: Maximum rows per forward pass; "auto" for as many as memory limits allow. Where keys of attention
            are long, there are fewer rows.
        device: "cuda" if available, else "cpu", by default; a model object stays on its device.
        dtype: Dtype of the weights: float32 (default), bfloat16, float16 or float64; a model object keeps its dtype.
        trust_remote_code: Whether code of the checkpoint may run.
        attention_window: Of a hybrid, as in `stateful`.
        max_batch_size: Upper limit if `batch_size` is "auto"; passed by lm_eval.
        independent_chunks: Tokens of chunks, in which longer contexts are read independently (OPRM); each stands
            between the first `instruction_tokens` and the last `question_tokens` of its context.

    Attributes:
        tokens_read: Tokens read so far, without generated ones, which shows what sharing saves.

    Raises:
        ValueError: for a model whose state is no value, and arguments that do not go together.
    """

    def __init__(
        self,
        pretrained: Any,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        batch_size: int | str | None = 1,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        trust_remote_code: bool = False,
        attention_window: int | str | None = None,
        max_batch_size: int | None = None,
        independent_chunks: int | None = None,
        question_tokens: int = QUESTION,
        instruction_tokens: int = 0,
    ) -> None:
        super().__init__()
        self._reader = _reader(pretrained, device, dtype, trust_remote_code, attention_window)
        self._device = self._reader.device
        if tokenizer is None:
            tokenizer = pretrained if isinstance(pretrained, str) else str(self._reader.model.name_or_path)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = load_tokenizer(tokenizer, trust_remote_code)
        self.tokenizer: Any = tokenizer
        self._prefix = text_prefix(tokenizer)
        if batch_size in ("auto", None):
            automatic = forward_plan(2**31, 2**31, self._reader.vocabulary, None, ROW_LENGTH)[0]
            batch_size = min(automatic, max_batch_size or automatic)
        self.batch_size = int(batch_size or 1)
        self.tokens_read = 0
        sizes = [1 if independent_chunks is None else independent_chunks, question_tokens, instruction_tokens]
        alone = independent_chunks is None and sizes[1:] != [QUESTION, 0]
        if alone or any(type(size) is not int for size in sizes) or sizes[0] < 1 or min(sizes) < 0:
            what = "tokens, 1 or more, with question_tokens and instruction_tokens, 0 or more"
            raise ValueError(f"independent_chunks is a number of {what}; got {independent_chunks!r}, {sizes[1:]}.")
        self._split: Any = independent_chunks, question_tokens, len(self._prefix) + instruction_tokens

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context, if the tokenizer puts none there."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return int(eos if bos is None else bos)

    @property
    def _before(self) -> Ids:
        """The tokens before a text without context."""
        return self._prefix or [self.prefix_token_id]

    @property
    def tokenizer_name(self) -> str:
        """For lm_eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Ids:
        """`text_ids`, without the prefix if `add_special_tokens` is False."""
        return text_ids(self.tokenizer, string, () if add_special_tokens is False else self._prefix)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation given its context, and whether it is the greedy one.

        A continuation with a token that the model masks (logit -inf) has log-likelihood -inf.

        Raises:
            ValueError: for a continuation without tokens, and if the model returns NaN.
        """
        contexts = []
        for (context, continuation), context_ids, continuation_ids in requests:
            if not continuation_ids:
                raise ValueError(f"The continuation {continuation!r} of {context[-80:]!r} has no tokens of its own.")
            # lm_eval moves a context of spaces into the continuation
            contexts.append((context_ids if context else []) or self._before)
        contexts = self._surest(contexts, disable_tqdm)
        results = [(0.0, False)] * len(contexts)
        for index, answer in self._scores(contexts, [scored for *_, scored in requests], disable_tqdm):
            results[index] = answer
            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole documents, each read as one stream after what stands before a text.

        Raises:
            ValueError: if the model returns NaN, and with `independent_chunks`.
        """
        if self._split[0] is not None:
            raise ValueError("No question stands after a document: leave independent_chunks out for its task.")
        strings = [str(request.args[0]) for request in requests]
        encoded = [self.tok_encode(string)[len(self._prefix) :] for string in strings]
        results = [0.0] * len(strings)
        places = [place for place, ids in enumerate(encoded) if ids]
        scored = [encoded[place] for place in places]
        for index, (result, _) in self._scores([self._before] * len(places), scored, disable_tqdm):
            results[places[index]] = result
            self.cache_hook.add_partial("loglikelihood_rolling", (strings[places[index]],), result)
        return results

    def _scores(
        self, contexts: Sequence[Ids], scored: Sequence[Ids], disable_tqdm: bool
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """The index of each pair, and the score of what is `scored` given its context; both have tokens."""
        texts = [context + ids for context, ids in zip(contexts, scored, strict=True)]
        starts = [len(context) for context in contexts]
        for index, branch in self._read(texts, starts, disable_tqdm):
            log_probability, likeliest = branch.scores(starts[index])
            answer = float(log_probability.sum()), bool(likeliest.all())
            if math.isnan(answer[0]):
                text = self.tokenizer.decode(texts[index])
                raise ValueError(
                    f"The log-likelihood of the end of {text[-200:]!r} is NaN, {len(texts[index])} tokens in: the "
                    "model overflows there or has broken weights. Evaluate in float32."
                )
            yield index, answer

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop strings, the end of text, or its number of tokens.

        Raises:
            ValueError: for generation arguments other than `GENERATION_ARGUMENTS`, `until` and a number of tokens, for
                penalties in the generation config of the model, and if the model predicts NaN.
        """
        results = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(index)
        for indices in alike.values():
            contexts = [str(requests[index].args[0]) for index in indices]
            arguments = requests[indices[0]].args[1]
            for place, text in self._generate(contexts, arguments, disable_tqdm):
                results[indices[place]] = text
                self.cache_hook.add_partial("generate_until", requests[indices[place]].args, text)
        return results

    def _generate(self, contexts: list[str], options: dict[str, Any], disable_tqdm: bool) -> Iterator[tuple[int, str]]:
        """The index of each context and its continuation, with the same options for all."""
        arguments = dict(normalize_gen_kwargs(options, MAX_GENERATED))
        end = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        stop = [text for text in handle_stop_sequences(arguments.pop("until"), eos=end) if text]
        new_tokens: Any = arguments.pop("max_gen_toks")
        if unknown := sorted(arguments.keys() - GENERATION_ARGUMENTS):
            raise ValueError(
                f"The model lengthgen does not generate with {', '.join(unknown)}, which may need the prompt, but "
                f"with {', '.join(sorted(GENERATION_ARGUMENTS))}: leave it out, or use the model hf."
            )
        check_generation(self._reader.model, arguments | {"max_new_tokens": new_tokens})
        if not arguments["do_sample"]:
            arguments.pop("temperature", None)
        ids = self._surest([self.tok_encode(context) or self._before for context in contexts], disable_tqdm)
        eos: int | Ids | None = self._reader.model.generation_config.eos_token_id
        ends = sorted({*(eos if isinstance(eos, list) else [eos]), self.eot_token_id} - {None})
        ending = Ending(self.tokenizer, stop, ends)
        pad = self.tokenizer.pad_token_id

        def generate(batch: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, str]]:
            places, carries = zip(*batch, strict=True)
            prompt = torch.tensor([ids[place][-1:] for place in places], device=self._device)
            read = {} if carries[0] is None else self._reader.generation_arguments(self._reader.join_rows(carries))
            with evaluation_mode(self._reader.model):
                output = self._reader.model.generate(
                    input_ids=prompt,
                    **read,
                    max_new_tokens=new_tokens,
                    stopping_criteria=StoppingCriteriaList([ending]),
                    logits_processor=LogitsProcessorList([BrokenLogits(ending, [contexts[p] for p in places])]),
                    eos_token_id=ends or None,
                    pad_token_id=self.prefix_token_id if pad is None else pad,
                    use_cache=True,
                    **arguments,
                )
            for place, tokens in zip(places, output[:, 1:].tolist(), strict=True):
                text = self.tokenizer.decode(ending.cut(tokens) or tokens, skip_special_tokens=True)
                yield place, postprocess_generated_text(text, stop, None)

        # the last token of a context is the prompt of generate; the tokens before it have been read
        waiting: dict[int, list[tuple[int, Any]]] = {}  # by the length of their keys, in which a batch agrees
        for place, branch in self._read([text[:-1] for text in ids], None, disable_tqdm):
            keys = None if branch.carry is None else self._reader.keys_of(branch.carry)
            tokens = -1 if branch.carry is None else 0 if keys is None else keys.get_seq_length()
            waiting.setdefault(tokens, []).append((place, branch.carry))
            if sum(map(len, waiting.values())) >= rows_with_room(self._reader, self.batch_size, max(waiting)):
                longest = max(waiting, key=lambda tokens: len(waiting[tokens]))
                yield from generate(waiting.pop(longest))
        for batch in waiting.values():
            yield from generate(batch)

    def _surest(self, contexts: list[Ids], disable_tqdm: bool) -> list[Ids]:
        """Each context, or with `independent_chunks` the prompt of the chunk in which the model is surest."""
        if self._split[0] is None:
            return contexts
        prompts = [chunk_prompts(ids, *self._split) for ids in contexts]
        texts = [text for chunks in prompts if len(chunks) > 1 for text in chunks]
        read = self._read(texts, None, disable_tqdm)
        entropies = {tuple(texts[index]): float(entropy(branch.last)) for index, branch in read}
        return [min(chunks, key=lambda text: entropies.get(tuple(text), 0.0)) for chunks in prompts]

    def _read(self, texts: list[Ids], starts: list[int] | None, disable_tqdm: bool) -> Iterator[tuple[int, Branch]]:
        """Read texts, and shared prefixes once; see `read_tree`."""
        root = prefix_tree(texts)
        yield from read_tree(
            self._reader, root, batch_size=self.batch_size, scored_from=starts, title="" if disable_tqdm else "reading"
        )
        self.tokens_read += tokens_to_read(root, starts is None)


def _reader(
    pretrained: Any, device: str | None, dtype: str | torch.dtype | None, trust_remote_code: bool, window: Any
) -> StateReader:
    if isinstance(pretrained, str):
        name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}.")
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        pretrained = load_language_model(pretrained, trust_remote_code, DTYPES[name], window).to(place)
    elif any(argument is not None for argument in (device, dtype, window)):
        raise ValueError("A model object keeps its device, dtype and window: leave those arguments out.")
    reader = reader_of(pretrained)
    if not isinstance(reader, StateReader):
        raise ValueError(
            f"The model lengthgen continues what it has read in several ways, which {reader.name} does not allow: "
            f"{reader.why}. Wrap a hybrid with stateful(model); for other models, use lm_eval's own model hf."
        )
    return reader
