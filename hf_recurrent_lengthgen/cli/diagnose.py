"""`lengthgen diagnose`: how checkpoints generalize in length, and why."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent_lengthgen.cli.parsing import CommandParser, in_columns
from hf_recurrent_lengthgen.cli.shared_options import add_options, settings_of
from hf_recurrent_lengthgen.evaluation.settings import DiagnosisSettings

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.metrics import Diagnosis
    from hf_recurrent_lengthgen.metrics.diagnosis.next_steps import Recipe

DESCRIPTION = """\
Measure how language models generalize in length, and why they fail: everything that `lengthgen evaluate` measures, and

  states           heads whose states leave the training distribution, and the excess loss from them
  remembrance      how much distant tokens change predictions (Effective Remembrance)
  misalignment     how far predictions move when the context is cut a little shorter
  constant prompt  the loss and the states on a text of line breaks only

Writes result.json, index.html and figures. A metric that does not fit a model is left out, with the reason. Each token
is read five times, and the first 4 T tokens of each text 32 times more for Effective Remembrance; --parts leaves it
out. Intervals are over texts: four texts or fewer are seldom conclusive. Results are cached by content: an
interrupted command continues where it was.
"""
EXAMPLES = """\
lengthgen diagnose demo-output/base demo-output/state-passing --roles base,intervention
lengthgen diagnose my-mamba2 --data book.txt --training-length 2048 --length 16384 --sequences 8
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen diagnose", DESCRIPTION, EXAMPLES)
    add_options(parser, DiagnosisSettings, output="diagnosis", sequences=16)
    return parser


def run(arguments: Sequence[str]) -> int:
    parser = command_parser()
    options = parser.parse_args(arguments)
    from hf_recurrent_lengthgen.cli.measuring import cache_note, load_inputs, ready
    from hf_recurrent_lengthgen.cli.report import summary, write_figures
    from hf_recurrent_lengthgen.evaluation.files import write_result
    from hf_recurrent_lengthgen.metrics.diagnosis.measure import diagnose_model
    from hf_recurrent_lengthgen.metrics.diagnosis.next_steps import next_steps
    from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis
    from hf_recurrent_lengthgen.metrics.tables import update_csv

    settings = settings_of(DiagnosisSettings, options, ["lengthgen", "diagnose", *arguments])
    inputs = load_inputs(options)
    token = _repeated_token(inputs.tokenizer, settings.repeated_text)
    windows = tuple(int(subject.window) for subject in inputs.subjects if subject.window not in (None, "none"))
    settings = dataclasses.replace(settings, repeated_token=token, attention_windows=windows)
    diagnosed = []
    for subject in inputs.subjects:
        model = ready(subject, inputs, "Diagnosing", options.device)
        about: Any = {"label": subject.label, "role": subject.role, "data": inputs.data, "cache": inputs.cache}
        result = diagnose_model(model, inputs.tokens, inputs.training_length, settings=settings, **about)
        diagnosed.append(result)
    diagnosis = Diagnosis("Length generalization, and why", tuple(diagnosed))
    folder = Path(options.output)
    write_result(folder / "result.json", diagnosis)
    update_csv(folder / "result.csv", diagnosis, options.csv)
    page = write_figures(diagnosis, folder)
    print(f"\n{summary(diagnosis.comparison)}\n\n{why_table(diagnosis)}")
    print(f"{cache_note(inputs.cache)}\nReport: {page}")
    chosen = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
    names = [subject.name for subject in inputs.subjects]
    for step in next_steps(diagnosis, names, chosen, [_recipe(name, inputs.data.source.name) for name in names]):
        print("\n".join([f"\nNext: {step.why}.", *(f"  {command}" for command in step.commands)]))
    return 0


def _recipe(name: str, data: str) -> "Recipe | None":
    """The last training of a checkpoint, if its lineage has one."""
    from hf_recurrent_lengthgen.checkpoints.adapters import base_of_learned_state, holds_adapter, holds_learned_state
    from hf_recurrent_lengthgen.checkpoints.methods import PLAIN
    from hf_recurrent_lengthgen.checkpoints.records import trainings
    from hf_recurrent_lengthgen.metrics.diagnosis.next_steps import Recipe

    last = next(reversed(trainings(name)), None)
    if last is None:
        return None
    split = last.data.split if last.data.name == data else None
    base = base_of_learned_state(name) if holds_learned_state(name) and not holds_adapter(name) else None
    return Recipe(last.settings[-1].learning_rate, last.rows_per_step, last.methods[0] == PLAIN, split, base)


def _repeated_token(tokenizer: Any, text: str | None) -> int | None:
    """None for a tokenizer without a line break; a `ValueError` for a text that is not one token."""
    from hf_recurrent_lengthgen.metrics.repeated_token import single_token

    token = single_token(tokenizer, "\n" if text is None else text)
    if token is None and text is not None:
        count = len(tokenizer.encode(text, add_special_tokens=False))
        raise ValueError(
            f"--repeated-text must be one token of the tokenizer, got {text!r}, which it reads as {count} tokens."
        )
    return token


def why_table(diagnosis: "Diagnosis") -> str:
    """One row per model with the facts of all parts, and below where they are explained, and what was not measured."""
    from hf_recurrent_lengthgen.metrics.diagnosis.page import facts, reasons

    by_model = [(model.evaluation.model, facts(model)) for model in diagnosis.models]
    names = list(dict.fromkeys(name for _, values in by_model for name in values))
    rows = [["model", *names], *([label, *(values.get(name, "-") for name in names)] for label, values in by_model)]
    where = 'Each column is defined in the report, "What the words mean".'
    return "\n".join([in_columns(rows), where, *reasons(diagnosis)])
