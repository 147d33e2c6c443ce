"""`lengthgen diagnose`: how checkpoints generalize in length, and why."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.cli.measuring import (
    add_options,
    announce,
    load_inputs,
    on_device,
    resumable,
    told_of_cache,
)
from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.report import draw, in_columns, summary_table, write_page
from hf_recurrent_lengthgen.evaluation.constant_prompt import newline_token
from hf_recurrent_lengthgen.evaluation.diagnose import PARTS, diagnose_model
from hf_recurrent_lengthgen.evaluation.diagnosis_results import DiagnosedModel, Diagnosis, RankCorrelation
from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.evaluation.rank_correlation import FEWEST_MODELS, rank_correlation
from hf_recurrent_lengthgen.evaluation.state_diagnosis import PATCHED_HEADS
from hf_recurrent_lengthgen.evaluation.state_results import StateDiagnosis, head_name
from hf_recurrent_lengthgen.evaluation.tables import rows_of, write_csv
from hf_recurrent_lengthgen.plotting.diagnosis_page import DIAGNOSIS_FIGURES, diagnosis_page

DESCRIPTION = """\
Measure how language models generalize in length, and see why they fail: everything of `lengthgen evaluate`, and

  states           which heads' states leave what training has seen, and how much of the harm these heads do
  remembrance      how much of a prediction the tokens far back make (Effective Remembrance)
  misalignment     how far predictions move when the context is cut a little shorter
  constant prompt  the loss of a text of line breaks only

  lengthgen diagnose demo-output/base demo-output/cured --roles base,cured --output diagnosis
  lengthgen diagnose my-mamba2 --data book.txt --split train --training-length 2048 --length 16384 --sequences 8

Each token is read four times, and the first 4 T of each text 32 times more (Effective Remembrance; --parts leaves it
out). Four texts or fewer seldom show anything: intervals are over texts.

Writes result.json, index.html and figures. Any causal language model will do; what one cannot be measured on is left
out, with the reason. An interrupted command goes on where it was.
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("lengthgen diagnose", description=DESCRIPTION)
    add_options(parser, output="diagnosis", sequences=16)
    parser.add_argument(
        "--parts",
        metavar="PART,...",
        help=f"which of {', '.join(PARTS)} to take beside the evaluation (default: all)",
    )
    parser.add_argument(
        "--patched-heads",
        type=int,
        default=PATCHED_HEADS,
        metavar="N",
        help="exchange the states of so many heads one by one, and of all that drift together; 0 exchanges nothing "
        "(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of random draws (default: %(default)s)")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the command with its arguments."""
    options = _parser().parse_args(arguments)
    parts = PARTS if options.parts is None else tuple(filter(None, (p.strip() for p in options.parts.split(","))))
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"--parts must be some of {', '.join(PARTS)}; got {', '.join(unknown)}.")
    inputs = load_inputs(options)
    diagnosed = []
    with resumable(inputs.cache):
        for subject in inputs.subjects:
            announce(subject, inputs, "Diagnosing")
            diagnosed.append(
                diagnose_model(
                    on_device(subject.model, options.device),
                    inputs.tokens,
                    inputs.training_length,
                    label=subject.label,
                    role=subject.role,
                    data_description=inputs.data_description,
                    token_unit=inputs.token_unit,
                    parts=parts,
                    repeated_token=line_break(inputs.tokenizer),
                    patched_heads=options.patched_heads,
                    seed=options.seed,
                    cache=inputs.cache,
                    command=shlex.join(["lengthgen", "diagnose", *arguments]),
                    progress=sys.stderr.isatty(),
                )
            )
    diagnosis = Diagnosis("Length generalization, and why", tuple(diagnosed), misalignment_and_loss(diagnosed))
    folder = Path(options.output)
    write_result(folder / "result.json", diagnosis)
    for name, figure_of in DIAGNOSIS_FIGURES.items():
        if (figure := figure_of(diagnosis)) is not None:
            draw(figure, folder / name)
    if options.csv:
        write_csv(folder / "result.csv", rows_of(diagnosis))
    page = write_page(folder, diagnosis_page(diagnosis))
    print(f"\n{summary_table(diagnosis.comparison)}\n\n{why_table(diagnosis)}")
    print(f"{told_of_cache(inputs.cache)}\nReport: {page}")
    return 0


def line_break(tokenizer: Any) -> int | None:
    """The id of the token that is one line break, if there is one."""
    try:
        return newline_token(tokenizer)
    except ValueError:
        return None


def misalignment_and_loss(models: Sequence[DiagnosedModel]) -> RankCorrelation | None:
    """The rank correlation of misalignment and the loss at the last octave; None for too few models, or no spread."""
    misalignment = {model.evaluation.model: model.misalignment.mean for model in models if model.misalignment}
    loss = {model.evaluation.model: late_loss(model) for model in models if model.misalignment}
    if len(loss) < FEWEST_MODELS or len(set(misalignment.values())) < 2 or len(set(loss.values())) < 2:
        return None
    return rank_correlation(misalignment, loss, "misalignment", "loss in the last octave")


def late_loss(model: DiagnosedModel) -> float:
    """Mean loss over the positions of the harm summary, from the bins inside them."""
    curve, (start, stop) = model.evaluation.position_wise.coarse, model.evaluation.harm.last_range
    bins = [
        (b - a, mean)
        for a, b, mean in zip(curve.edges, curve.edges[1:], curve.mean, strict=False)
        if a >= start and b <= stop
    ]
    return sum(width * mean for width, mean in bins) / sum(width for width, _ in bins)


def why_table(diagnosis: Diagnosis) -> str:
    """One row per model: heads that drift, their share of the harm, remembrance, misalignment, constant prompt."""
    rows = [("model", "heads that drift", "their harm", "EffRem beyond T", "misalignment", "constant prompt")]
    for model in diagnosis.models:
        rows.append(
            (
                model.evaluation.model,
                "-" if model.states is None else drifting_heads(model.states),
                "-" if model.states is None else restored_share(model.states),
                "-"
                if model.remembrance is None or (far := model.remembrance.beyond_training) is None
                else f"{far.mean:.3f}",
                "-" if model.misalignment is None else f"{model.misalignment.mean:.3f}",
                "-" if model.constant_prompt is None else constant_prompt_text(model),
            )
        )
    reasons = [
        f"{model.evaluation.model}, {name}: {reason}"
        for model in diagnosis.models
        for name, reason in [
            *model.refused.items(),
            *(("states", reason) for reason in (model.states.left_out if model.states else ())),
        ]
    ]
    return "\n".join([in_columns(rows), *reasons])


def drifting_heads(states: StateDiagnosis) -> str:
    """ "3 of 16: layer 1, head 2; ..." with the three that drift most."""
    drifting = states.drifting
    total = len(states.ranking)
    if not states.names_heads:
        return f"not told from {states.sequences} texts"
    if not drifting:
        return f"none of {total}"
    named = "; ".join(head_name(*pair) for pair in drifting[:3])
    return f"{len(drifting)} of {total}: {named}{'; ...' if len(drifting) > 3 else ''}"


def restored_share(states: StateDiagnosis) -> str:
    """Share of the harm that goes away with the states of the drifting heads alone."""
    patching = states.patching
    if patching is None or not states.drifting or not patching.harmful:
        return "-"
    share = patching.share(patching.groups[0].restored)
    return "-" if share is None else f"{share:.0%} removed"


def constant_prompt_text(model: DiagnosedModel) -> str:
    """Where the loss of the constant prompt leaves what it is inside the training length."""
    assert model.constant_prompt is not None
    exceeded = model.constant_prompt.exceeded_from
    return "holds" if exceeded is None else f"fails from {exceeded:,}"
