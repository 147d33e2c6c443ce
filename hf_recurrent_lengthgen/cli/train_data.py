"""The data of `lengthgen train`: text, passkeys, questions, examples or symbols."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_recurrent_lengthgen.cli.inputs import load_documents, load_stream
from hf_recurrent_lengthgen.cli.options import continues
from hf_recurrent_lengthgen.cli.run_arguments import RunArguments
from hf_recurrent_lengthgen.data import ContinuedChunks, LabelledExamples, PackedBlocks, keep_long_documents, load_rows
from hf_recurrent_lengthgen.data.tasks import (
    EVALUATION_SEED,
    BabilongPrompts,
    KeyPrompts,
    PackedStrings,
    PasskeyPrompts,
    babi_files,
    read_babi,
    string_task,
)
from hf_recurrent_lengthgen.trainers import InitialStateConfig
from hf_recurrent_lengthgen.trainers.alignment_loss import default_extra

TASK_SAMPLES, TASK_EVALUATION_SAMPLES = 100_000, 256
"""Samples of an epoch if max_steps does not limit them, and of an evaluation."""


def training_data(settings: RunArguments, training: InitialStateConfig, tokenizer: Any) -> Any:
    sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.row_processes
    samples = sequences * training.max_steps if training.max_steps > 0 else TASK_SAMPLES
    data = _task_data(settings, training, tokenizer, samples, held_out=False)
    if settings.task != "text":
        return data
    lookahead = 0  # tokens that the alignment loss reads beyond the training length
    if training.alignment_alpha:
        length = training.alignment_length
        assert length is not None
        lookahead = training.alignment_max_extra or default_extra(length, training.alignment_min_context)
    if continues(training):
        return ContinuedChunks(
            data,
            settings.length,
            settings.chunks_before_reset or None,
            settings.reset_at_document,
            tokenizer.eos_token_id if settings.reset_at_document else None,
            lookahead,
        )
    # a block of n predictions has n + 1 tokens
    return PackedBlocks(data, settings.length + max(lookahead - 1, 0))


def evaluation_data(settings: RunArguments, training: InitialStateConfig, tokenizer: Any) -> Any:
    """The evaluation data: other text, keys or questions than the training data."""
    data = _task_data(settings, training, tokenizer, TASK_EVALUATION_SAMPLES, held_out=True)
    return PackedBlocks(data, settings.length) if settings.task == "text" else data


def _task_data(
    settings: RunArguments, training: InitialStateConfig, tokenizer: Any, samples: int, *, held_out: bool
) -> Any:
    """The sequences of a task, or the stream of a text; those for evaluation are `held_out`."""
    seed, lengths = training.seed + held_out, settings.sequence_lengths
    if settings.of_symbols:
        seed = training.seed + EVALUATION_SEED * held_out
        strings = string_task(settings.task, lengths, settings.task_vocabulary, samples, seed, begin=True)
        row_length = settings.task_row_length
        return PackedStrings(strings, row_length, samples) if row_length else strings
    if settings.task == "passkey":
        return PasskeyPrompts(tokenizer, lengths, samples, seed, style=settings.task_style)
    data = settings.chosen_eval_data if held_out else settings.data
    split = settings.chosen_eval_split if held_out else settings.chosen_split
    if settings.task == "examples":
        return LabelledExamples(load_rows(data, split), tokenizer)
    if settings.task == "babilong":
        assert settings.task_files is not None
        files = babi_files(settings.task_files, "test" if held_out else "train")
        questions = [question for file in files for question in read_babi(file)]
        background = load_documents(data, split, settings.text_column)
        prompts = BabilongPrompts(tokenizer, questions, background, lengths, seed)
        if left := prompts.left_out:
            print(f"Left out {left} of {len(questions)} questions: their facts do not fit into a sequence.")
        return prompts
    stream = stream_of(settings, data, split, tokenizer)
    if settings.task == "keys":
        return KeyPrompts(tokenizer, stream, lengths, samples, seed, settings.task_keys, settings.task_values)
    return stream


def with_training_length(
    settings: RunArguments, training: InitialStateConfig, longest: int, requested: int | None
) -> RunArguments:
    """The settings with the training length of prompts or examples: the chunk in which they are read, or the longest.

    Args:
        settings: With the training length of the command line, of the model, or the default.
        training: Its `bptt_chunk_length` becomes the training length in tbtt, unless it is set.
        longest: Tokens of the longest sequence.
        requested: The training length on the command line, or None.

    Raises:
        ValueError: for sequences of one chunk in tbtt, and if whole sequences are longer than the `requested` length.
    """
    if continues(training):
        training.bptt_chunk_length = training.bptt_chunk_length or settings.length
        if longest <= training.bptt_chunk_length:
            remedy = "" if settings.task == "examples" else " (task_length)"
            raise ValueError(
                f"tbtt does nothing here: the longest sequence has {longest} tokens, and a chunk has "
                f"{training.bptt_chunk_length}. Give longer sequences{remedy}, shorter chunks (training_length), "
                "or --intervention none."
            )
        training.check()  # with the chunks
    in_chunks = continues(training) or training.bptt_window is not None
    if requested is not None and requested < longest and not in_chunks:
        raise ValueError(
            f"training_length is {requested}, but sequences are read whole, and the longest has {longest} tokens: "
            "leave training_length out, or read sequences in chunks of it with --intervention tbtt."
        )
    return replace(settings, training_length=requested or (training.bptt_chunk_length if in_chunks else longest))


def stream_of(settings: RunArguments, data: str, split: str, tokenizer: Any) -> Tensor:
    stream = load_stream(data, split, tokenizer, settings.text_column).tokens
    least = settings.minimum_document_tokens
    return keep_long_documents(stream, tokenizer.eos_token_id, least) if least else stream
