"""`lengthgen evaluate`: position-wise loss, excess loss from context and the length verdict of checkpoints."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import add_options, settings_of
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
    from hf_recurrent_lengthgen.metrics import Comparison

DESCRIPTION = """\
Measure language models beyond their training length T: loss by position, excess loss from context, the length up to
which each model generalizes, and the differences between models. Writes result.json, index.html, figures and tables.

Any causal language model of Transformers can be measured. Recurrent models need constant memory for texts of any
length, attention a growing cache of keys and values. Each token is read three times: once after its whole text, twice
in windows of T tokens. Results are cached by content: an interrupted command continues where it was.
"""
EXAMPLES = """\
lengthgen evaluate demo-output/base demo-output/state-passing --roles base,intervention
lengthgen evaluate my-mamba2 --data book.txt --training-length 2048 --length 65536 --sequences 4
lengthgen evaluate model_cards/bamba-state-passing --attention-window 32,128,512,none
lengthgen evaluate runs/plain runs/state_passing  # each with seed0, seed1, ...
lengthgen evaluate state-spaces/mamba2-1.3b-hf --training-length 2048 --dtype bfloat16
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen evaluate", DESCRIPTION, EXAMPLES)
    add_options(parser, EvaluationSettings, output="evaluation", sequences=32)
    what = "also draw the mean over texts of exp(loss) by position; perplexity is exp of the mean loss elsewhere"
    parser.method.add_argument("--mean-perplexity", action="store_true", help=what)
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    from hf_recurrent_lengthgen.cli.measuring import cache_note
    from hf_recurrent_lengthgen.cli.report import draw, summary, write_report
    from hf_recurrent_lengthgen.metrics.context_harm.figure import mean_perplexity_figure
    from hf_recurrent_lengthgen.metrics.tables import update_csv

    comparison, cache = compare(options, arguments)
    print(f"\n{summary(comparison)}")
    page = write_report(comparison, Path(options.output))
    update_csv(page.with_name("result.csv"), comparison, options.csv)
    if options.mean_perplexity or page.with_name("mean_perplexity.png").is_file():  # an old one is replaced
        draw(mean_perplexity_figure(comparison.models), page.with_name("mean_perplexity"))
    print(f"{cache_note(cache)}\nReport: {page}")
    return 0


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> "tuple[Comparison, ResultCache | None]":
    """Measure all models; also the cache of results."""
    from hf_recurrent_lengthgen.checkpoints.records import last_training, read_lineage
    from hf_recurrent_lengthgen.cli.measuring import load_inputs, ready
    from hf_recurrent_lengthgen.metrics.context_harm.measure import differences, evaluate_model
    from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison

    settings = settings_of(EvaluationSettings, options, ["lengthgen", "evaluate", *arguments])
    inputs = load_inputs(options)
    compared = []
    for subject in inputs.subjects:
        model, about = ready(subject, inputs, "Evaluating", options.device), (subject.label, inputs.data)
        result = evaluate_model(model, inputs.tokens, inputs.training_length, *about, settings, cache=inputs.cache)
        training = last_training(read_lineage(subject.name))
        compared.append(ComparedModel(subject.role, result, training, subject.method, subject.seed))
    return Comparison("Beyond the training length", tuple(compared), differences(compared)), inputs.cache
