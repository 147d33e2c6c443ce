"""`lengthgen forget`: a copy of a checkpoint that forgets more at inference than it has learned to."""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_recurrent_lengthgen.adapters import refuse_adapter
from hf_recurrent_lengthgen.cli.inputs import (
    chosen_split,
    load_stream,
    token_unit,
)
from hf_recurrent_lengthgen.cli.measuring import on_device
from hf_recurrent_lengthgen.cli.new_checkpoint import check_new, save_checkpoint, tokenizer_to_copy
from hf_recurrent_lengthgen.cli.parsing import CommandParser, positive
from hf_recurrent_lengthgen.cli.report import estimate_text, in_columns
from hf_recurrent_lengthgen.cli.shared_options import add_new_folder, add_shared
from hf_recurrent_lengthgen.data import evaluation_sequences
from hf_recurrent_lengthgen.evaluation.evaluate import EvaluationSettings
from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.evaluation.forgetting_search import (
    RETENTIONS,
    SEARCH_LENGTH,
    forgetting_grid,
    in_words,
    rule_of,
    search_forgetting,
)
from hf_recurrent_lengthgen.evaluation.results import DataRecord, ForgettingSearch
from hf_recurrent_lengthgen.lineage import lineage_of, record_step
from hf_recurrent_lengthgen.loading import load_model, load_tokenizer
from hf_recurrent_lengthgen.models.forgetting import Forgetting
from hf_recurrent_lengthgen.models.forgetting_switch import forgetting
from hf_recurrent_lengthgen.models.stateful_model import StatefulModel
from hf_recurrent_lengthgen.private_text import portable

DESCRIPTION = """\
Make a copy of a checkpoint that forgets at inference, without training (Chen et al., 2024): its states hold the last
tokens only (--window), keep and take in less (--retention and --insertion; the paper takes 0.9999 and 0.75), or take
smaller steps (--delta-scale, as LongMamba; Mamba only). The weights stay unchanged; the config of the copy says how it
forgets.

--search takes the setting with the least loss on long texts. Search on other texts than those you report on.
"""
EXAMPLES = """\
lengthgen forget demo-output/base --output forgets --window 128
lengthgen forget my-mamba2 --output forgets --retention 0.9999 --insertion 0.75
lengthgen forget my-mamba2 --output forgets --search --data book.txt --split train
lengthgen evaluate my-mamba2 forgets
"""
SEARCH_FILE = "forgetting_search.json"
_NOT_GIVEN = object()
OF_SEARCH = ("data", "split", "text_column", "tokenizer", "length", "sequences", "device", "trials")


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen forget", DESCRIPTION, EXAMPLES, method="forgetting")
    parser.model.add_argument(
        "model",
        metavar="MODEL",
        help="checkpoint folder or Hub name: ours, a stock one of these families, or a hybrid with Mamba layers",
    )
    add = parser.method.add_argument
    add("--window", type=positive, nargs="+", metavar="N", help="tokens that the state of each layer holds")
    scale: dict[str, Any] = {"type": float, "nargs": "+", "metavar": "X"}
    add("--retention", help="factor on the decays, above 0 and at most 1", **scale)
    add("--insertion", help="factor on what is written into the state", **scale)
    add("--delta-scale", help="factor on the step sizes of Mamba, at most 1", **scale)
    add(
        "--search",
        action="store_true",
        help="try all pairs of the values given, several for each option, and take the best; without values: "
        f"retention {', '.join(f'{x:g}' for x in RETENTIONS)} with insertion 1, 0.9, 0.75, 0.5; windows of 0.5, 1, 2 "
        "and 4 training lengths; delta scale 0.5",
    )
    what = "keep the trials in this JSON file, from which an interrupted search continues; they are also saved with "
    add("--trials", metavar="FILE", help=f"{what}the copy, as {SEARCH_FILE} [--search]")
    add_new_folder(parser, required=False)
    add_shared(parser, "--data", "--split", "--text-column", "--tokenizer", "--device", "--trust-remote-code")
    length = "tokens per text (default: %(default)s, as in the paper)"
    parser.data.add_argument("--length", type=positive, default=SEARCH_LENGTH, metavar="N", help=length)
    what = "number of sequences (default: %(default)s)"
    parser.data.add_argument("--sequences", type=positive, default=4, metavar="N", help=what)
    return parser


def run(arguments: Sequence[str]) -> int:
    parser = command_parser()
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in Forgetting._fields if getattr(options, name) is not None}
    refuse_adapter(options.model)
    output = None if options.output is None else Path(options.output)
    if output is not None:
        check_new(output)
    found = None
    if options.search:
        found = _search(options, given)
        print(search_table(found))
        rule = rule_of(found.best)
        if rule == Forgetting() and output is not None:
            print("No copy is written.")
        if rule == Forgetting() or output is None:
            return 0
    else:
        without = parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(OF_SEARCH, _NOT_GIVEN)))
        idle = [f"--{name.replace('_', '-')}" for name in OF_SEARCH if getattr(without, name) is not _NOT_GIVEN]
        if idle:
            raise ValueError(f"{', '.join(idle)} does nothing without --search: leave it out, or add --search.")
        rule = _chosen(given)
        if output is None:
            raise ValueError("Give --output, the folder for the copy.")
    _save(options, rule, output, found, ["lengthgen", "forget", *arguments])
    return 0


def _chosen(given: dict[str, list[Any]]) -> Forgetting:
    """The one setting to save."""
    if several := [f"--{name.replace('_', '-')}" for name, values in given.items() if len(values) > 1]:
        raise ValueError(
            f"{', '.join(several)} has several values: give one value, or --search, which takes the best."
        )
    rule = Forgetting(**{name: values[0] for name, values in given.items()})
    if rule == Forgetting():
        raise ValueError(
            "Nothing would be forgotten: give --window, --retention, --insertion, --delta-scale or --search."
        )
    return rule


def _search(options: argparse.Namespace, given: dict[str, list[Any]]) -> ForgettingSearch:
    model = _loaded(options, torch.float32)
    settings = _grid(model, given)
    tokenizer = load_tokenizer(options.tokenizer or options.model, options.trust_remote_code)
    split = chosen_split(options.data, options.split, "validation")
    stream = load_stream(options.data, split, tokenizer, options.text_column)
    tokens = evaluation_sequences(stream.tokens, options.sequences, options.length + 1)
    unit = token_unit(tokenizer)
    print(f"Trying {len(settings)} settings on {len(tokens)} texts of {options.length:,} {unit}s\n", flush=True)
    return search_forgetting(
        on_device(model, options.device),
        tokens,
        settings,
        portable(options.model),
        DataRecord(stream.source, token_unit=unit),
        EvaluationSettings(progress=sys.stderr.isatty()),
        file=options.trials,
    )


def search_table(found: ForgettingSearch) -> str:
    rows = [("setting", f"loss to {found.length:,}", "gain")]
    for trial in found.trials:
        texts = estimate_text(trial.loss, digits=4), estimate_text(trial.gain, "+", digits=4)
        rows.append((in_words(rule_of(trial)), *texts))
    note = (
        f"nats per {found.data.token_unit} with {found.confidence:.0%} intervals over {found.sequences} texts; gain: "
        "less loss than without forgetting, on the same texts."
    )
    return "\n".join([in_columns(rows), note, conclusion(found)])


def conclusion(found: ForgettingSearch) -> str:
    best, nothing = found.best, found.trials[0]
    if best is nothing:
        return f"Not to forget is best: loss {nothing.loss.mean:.4f}. No setting in the search is better."
    text = (
        f"Best is {in_words(rule_of(best))}: loss {best.loss.mean:.4f}, against {nothing.loss.mean:.4f} with no "
        "forgetting."
    )
    if best.gain.low is None or best.gain.low <= 0:
        text += " But the difference may be chance: its interval includes 0, or there is only one text."
    return text


def _grid(model: StatefulModel, given: dict[str, list[Any]]) -> list[Forgetting]:
    """The settings to try: the values given, or those of the defaults that the model supports."""
    if given:
        off: dict[str, Any] = {"retention": [1.0], "insertion": [1.0], "window": [], "delta_scale": []}
        values = off | given
        return forgetting_grid(values["retention"], values["insertion"], values["window"], values["delta_scale"])
    length = getattr(model.config, "training_length", None)
    windows = [] if length is None else [max(1, length // 2), length, 2 * length, 4 * length]
    with forgetting(model, retention=RETENTIONS[-1]):  # raises for a model that cannot forget at all
        pass
    return [rule for rule in forgetting_grid(windows=windows, delta_scales=[0.5]) if _honors(model, rule)]


def _honors(model: StatefulModel, rule: Forgetting) -> bool:
    try:
        with forgetting(model, **rule._asdict()):
            return True
    except ValueError:
        return False


def _loaded(options: argparse.Namespace, dtype: torch.dtype) -> Any:
    model = load_model(options.model, options.trust_remote_code, dtype)
    if Forgetting.of(model.config) != Forgetting():
        raise ValueError(
            f"{options.model} forgets already ({in_words(Forgetting.of(model.config))}): give the checkpoint that it "
            "was made from."
        )
    return model


def _save(
    options: argparse.Namespace, rule: Forgetting, output: Path, found: ForgettingSearch | None, command: list[str]
) -> None:
    """Write the copy, with the weights in the dtype of the checkpoint."""
    values, _ = PreTrainedConfig.get_config_dict(options.model)
    dtype = getattr(torch, str(values.get("dtype") or values.get("torch_dtype") or "float32"), torch.float32)
    model = _loaded(options, dtype)
    plain = _state_elements(model)
    changed = {name: value for name, value in rule._asdict().items() if value != Forgetting._field_defaults[name]}
    with forgetting(model, **changed):
        done = [*(getattr(model.config, "interventions", None) or ()), f"forgetting at inference: {in_words(rule)}"]
        model.config.interventions = done
        start = lineage_of(options.model)

        def write(folder: Path) -> None:
            record_step(folder, start, "forget", done[-1], command)
            if found is not None:
                write_result(folder / SEARCH_FILE, found)

        save_checkpoint(model, tokenizer_to_copy(options.model, options.trust_remote_code), output, write)
        if rule.window is not None:
            print(f"State of a sequence: {plain:,} -> {_state_elements(model):,} numbers.")
    if not hasattr(model.config, "check_forgetting"):
        print(
            f"It forgets when hf_recurrent_lengthgen loads it, but not as {values.get('model_type')} of Transformers."
        )
    remote = ["--trust-remote-code"] if options.trust_remote_code else []
    compare = shlex.join(["lengthgen", "evaluate", options.model, str(output), *remote])
    print(f"Saved to {output}: {in_words(rule)}. Next: {compare}")


def _state_elements(model: StatefulModel) -> int:
    return sum(math.prod(part) for shape in model.state_shapes() for part in shape)
