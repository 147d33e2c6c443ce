"""`lengthgen evaluate`: position-wise loss, context harm and the length verdict of one or more checkpoints."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hf_recurrent_lengthgen.cli.inputs import DATA_HELP, load_model, load_stream, load_tokenizer, token_unit
from hf_recurrent_lengthgen.cli.report import summary_table, write_report
from hf_recurrent_lengthgen.data import evaluation_sequences
from hf_recurrent_lengthgen.evaluation.evaluate import evaluate_model
from hf_recurrent_lengthgen.evaluation.results import ComparedModel, Comparison


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lengthgen evaluate",
        description="Measure language models beyond their training length: loss by position, what the extra context "
        "does (context harm), and how far each model holds. Writes result.json, index.html and figures.",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="checkpoint folder or Hub name")
    parser.add_argument("--output", default="evaluation", help="folder for the results (default: %(default)s)")
    parser.add_argument("--data", default="stdlib", help=f"text to evaluate on (default: %(default)s). {DATA_HELP}")
    parser.add_argument("--split", default="validation", help="split of the data (default: %(default)s)")
    parser.add_argument("--text-column", default="text", help="column that holds the text (default: %(default)s)")
    parser.add_argument("--tokenizer", help='tokenizer folder or name, or "bytes" (default: the first model\'s)')
    parser.add_argument(
        "--training-length", type=int, help="training length T (default: from the first model's config)"
    )
    parser.add_argument("--length", type=int, help="tokens per sequence (default: 64 T)")
    parser.add_argument("--sequences", type=int, default=32, help="number of sequences (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="device to run on (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that checkpoints carry")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the command with its arguments."""
    options = _parser().parse_args(arguments)
    models = [load_model(name, options.trust_remote_code) for name in options.models]
    training_length = options.training_length or getattr(models[0].config, "training_length", None)
    if training_length is None:
        raise ValueError(f"The config of {options.models[0]} names no training length: give --training-length.")
    length = options.length or 64 * training_length
    tokenizer = load_tokenizer(options.tokenizer or options.models[0], options.trust_remote_code)
    stream = load_stream(options.data, options.split, tokenizer, options.text_column)
    tokens = evaluation_sequences(stream.tokens, options.sequences, length + 1)
    results = [
        evaluate_model(
            model.to(options.device),
            tokens,
            training_length,
            label=name,
            data_description=stream.description,
            token_unit=token_unit(tokenizer),
        )
        for name, model in zip(options.models, models, strict=True)
    ]
    title = "Beyond the training length"
    comparison = Comparison(title, tuple(ComparedModel("other", result, None) for result in results))
    print(summary_table(comparison))
    print(f"\nReport: {write_report(comparison, Path(options.output))}")
    return 0
