"""`lengthgen evaluate`: position-wise loss, context harm and the length verdict of one or more checkpoints."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_recurrent_lengthgen.cli.inputs import DATA_HELP, load_stream, load_tokenizer, token_unit
from hf_recurrent_lengthgen.cli.report import summary_table, write_report
from hf_recurrent_lengthgen.data import evaluation_sequences
from hf_recurrent_lengthgen.evaluation.evaluate import evaluate_model
from hf_recurrent_lengthgen.evaluation.forgetting_search import in_words
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.results import ComparedModel, Comparison
from hf_recurrent_lengthgen.evaluation.streaming import check_tokens
from hf_recurrent_lengthgen.loading import load_model
from hf_recurrent_lengthgen.models.forgetting import Forgetting

DESCRIPTION = """\
Measure language models beyond their training length T: loss by position, what the context beyond T does to
predictions (context harm), and how far each model holds. Writes result.json, index.html and figures.

  lengthgen evaluate demo-output/base demo-output/cured --output comparison
  lengthgen evaluate my-mamba2 --data book.txt --split train --training-length 2048 --length 65536 --sequences 4
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lengthgen evaluate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="checkpoint folder or Hub name: ours, a stock one of these families, or a hybrid",
    )
    parser.add_argument("--output", default="evaluation", help="folder for the results (default: %(default)s)")
    parser.add_argument("--data", default="stdlib", help=f"text to evaluate on (default: %(default)s): {DATA_HELP}")
    parser.add_argument(
        "--split", default="validation", help="split of the data; a single file is train (default: %(default)s)"
    )
    parser.add_argument("--text-column", default="text", help="column that holds the text (default: %(default)s)")
    parser.add_argument("--tokenizer", help='tokenizer folder or name, or "bytes" (default: the models\' own)')
    parser.add_argument(
        "--training-length",
        type=positive,
        metavar="T",
        help="training length (default: from the first model's config)",
    )
    parser.add_argument("--length", type=positive, metavar="N", help="tokens per sequence (default: 64 T)")
    parser.add_argument(
        "--sequences", type=positive, default=32, metavar="N", help="number of sequences (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="device to run on, such as cuda (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that checkpoints carry")
    return parser


def positive(text: str) -> int:
    """A number of the command line that is at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def run(arguments: Sequence[str]) -> int:
    """Run the command with its arguments."""
    options = _parser().parse_args(arguments)
    if len(set(options.models)) < len(options.models):
        raise ValueError(f"Each model can be given once, got {' '.join(options.models)}.")
    models = [load_model(name, options.trust_remote_code) for name in options.models]
    training_length = options.training_length or getattr(models[0].config, "training_length", None)
    if training_length is None:
        raise ValueError(f"The config of {options.models[0]} names no training length: give --training-length.")
    length = options.length or 64 * training_length
    if length <= training_length:
        raise ValueError(f"--length is {length}, but must be above the training length, {training_length}.")
    tokenizer = _tokenizer(options)
    stream = load_stream(options.data, options.split, tokenizer, options.text_column)
    tokens = evaluation_sequences(stream.tokens, options.sequences, length + 1)
    for model in models:  # before the first evaluation, which may take long
        check_tokens(tokens, reader_of(model).vocabulary, training_length + 1)
    Path(options.output).mkdir(parents=True, exist_ok=True)  # fails now rather than after hours
    compared = []
    for name, model in zip(options.models, models, strict=True):
        print(f"Evaluating {name} on {len(tokens)} texts of {length:,} {token_unit(tokenizer)}s")
        result = evaluate_model(
            on_device(model, options.device),
            tokens,
            training_length,
            label=_label(name, model.config),
            data_description=stream.description,
            token_unit=token_unit(tokenizer),
            progress=sys.stderr.isatty(),
        )
        compared.append(ComparedModel("other", result, None))
    comparison = Comparison("Beyond the training length", tuple(compared))
    print(f"\n{summary_table(comparison)}")
    print(f"\nReport: {write_report(comparison, Path(options.output))}")
    return 0


def _label(name: str, config: Any) -> str:
    """The name of a model, with how it is made to forget."""
    rule = Forgetting.of(config)
    return name if rule == Forgetting() else f"{name} ({in_words(rule)})"


def _tokenizer(options: argparse.Namespace) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the one that all models share."""
    if options.tokenizer:
        return load_tokenizer(options.tokenizer, options.trust_remote_code)
    first, *others = (load_tokenizer(name, options.trust_remote_code) for name in options.models)
    for name, other in zip(options.models[1:], others, strict=True):
        if other.get_vocab() != first.get_vocab():
            raise ValueError(
                f"{options.models[0]} and {name} have different tokenizers, so their losses cannot be compared: "
                "evaluate them one by one, or give the right one with --tokenizer."
            )
    return first


def on_device(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """The model on the device that a person named."""
    try:
        return model.to(torch.device(device))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        raise ValueError(f"Cannot use the device {device!r}: {error}") from error
