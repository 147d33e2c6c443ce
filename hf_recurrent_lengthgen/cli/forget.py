"""`lengthgen forget`: a copy of a checkpoint with stronger decay at inference."""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.cli.parsing import CommandParser, positive, scales, some_tokens
from hf_recurrent_lengthgen.cli.shared_options import add_new_folder, add_shared

DESCRIPTION = """\
Make a copy of a checkpoint with stronger decay at inference, without training (Chen et al., 2024): a sliding window on
the state (--window), factors on decay and input (--retention and --insertion; 0.9999 and 0.75 in the paper), smaller
steps Delta (--delta-scale, as LongMamba) or a power of the decays (--decay-scale). --calibrate finds a scale for each
layer on a text (MambaExtend, Mamba Modulation). Mamba-2 supports all of these, other families some, hybrids none. The
weights stay unchanged; the config of the copy records the change.
"""
EXAMPLES = """\
lengthgen forget demo-output/base --output forgets --window 128
lengthgen forget my-mamba2 --output forgets --retention 0.9999 --insertion 0.75
lengthgen forget my-gla --output scaled --calibrate decay_scale --data text.txt --length 16k
lengthgen evaluate my-mamba2 forgets
"""
CALIBRATION = ("tokenizer", "data", "split", "text_column", "device", "seed", "length", "sequences")
"""Options that only `--calibrate` reads."""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen forget", DESCRIPTION, EXAMPLES, method="forgetting")
    what = "checkpoint folder or Hub name: ours, or a stock one of these families; hybrids are refused"
    parser.model.add_argument("model", metavar="MODEL", help=what)
    add = parser.method.add_argument
    add("--window", type=some_tokens, metavar="N", help="number of last tokens in the state of each layer")
    add("--retention", type=float, default=1.0, metavar="X", help="factor on the decays, above 0 and at most 1")
    add("--insertion", type=float, default=1.0, metavar="X", help="factor on what is written into the state")
    add("--delta-scale", type=scales, default=1.0, metavar="X,...", help="factor on steps of Mamba, or one by layer")
    add("--decay-scale", type=scales, default=1.0, metavar="X,...", help="power of decays (factor on A), likewise")
    what = "find, for each layer, the scale with the lowest loss on --sequences sequences of --data"
    add("--calibrate", choices=("decay_scale", "delta_scale"), help=what)
    add_shared(parser, "--tokenizer", "--data", "--split", "--text-column", "--device", "--seed", split="train")
    what = "tokens per sequence, beyond the training length T (default: 16 T)"
    parser.data.add_argument("--length", type=some_tokens, metavar="N", help=what)
    what = "number of sequences (default: %(default)s)"
    parser.data.add_argument("--sequences", type=positive, default=50, metavar="N", help=what)
    add_new_folder(parser)
    add_shared(parser, "--trust-remote-code")
    return parser


def run(arguments: Sequence[str]) -> int:
    parser = command_parser()
    options = parser.parse_args(arguments)
    import torch
    from transformers import PreTrainedConfig

    from hf_recurrent_lengthgen.checkpoints.adapters import refuse_adapter
    from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new, save_checkpoint
    from hf_recurrent_lengthgen.checkpoints.loading import load_model
    from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
    from hf_recurrent_lengthgen.evaluation.streaming import state_elements
    from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting, forgetting, in_words

    rule = Forgetting(**{name: getattr(options, name) for name in Forgetting._fields})
    refuse_adapter(options.model)
    output = Path(options.output)
    check_new(output)
    settings = "--window, --retention, --insertion, --delta-scale or --decay-scale"
    if rule == Forgetting() and options.calibrate is None:
        raise ValueError(f"Nothing would be forgotten: set {settings}, or find a scale with --calibrate.")
    if rule != Forgetting() and options.calibrate is not None:
        raise ValueError(f"--calibrate finds what is forgotten: leave out {settings}.")
    unread = [name for name in CALIBRATION if getattr(options, name) != parser.get_default(name)]
    if options.calibrate is None and unread:
        named = ", --".join(unread).replace("_", "-")
        raise ValueError(f"No text is read without --calibrate: leave --{named} out, or give it.")
    values, _ = PreTrainedConfig.get_config_dict(options.model)
    dtype = getattr(torch, str(values.get("dtype") or values.get("torch_dtype") or "float32"), torch.float32)
    model: Any = load_model(options.model, options.trust_remote_code, dtype)  # weights stay in their dtype
    if (before := Forgetting.of(model.config)) != Forgetting():
        raise ValueError(
            f"{options.model} forgets already ({in_words(before)}): give the checkpoint that it was made from."
        )
    calibrated, where = _calibrated(model, options) if options.calibrate else ((), "")
    rule = Forgetting(**{options.calibrate: calibrated}) if calibrated else rule  # type: ignore[arg-type]
    plain = state_elements(model)
    with forgetting(model, **rule.changed()):
        what = f"forgetting at inference: {in_words(rule)}{where}"
        model.config.interventions = [*(getattr(model.config, "interventions", None) or ()), what]
        source = options.model, options.trust_remote_code
        command = ["lengthgen", "forget", *arguments]
        save_checkpoint(model, output, *source, lineage_of(options.model), "forget", what, command)
        if rule.window is not None:
            print(f"State of a sequence: {plain:,} -> {state_elements(model):,} numbers.")
    remote = ["--trust-remote-code"] if options.trust_remote_code else []
    compare = shlex.join(["lengthgen", "evaluate", options.model, str(output), *remote])
    print(f"Saved to {output}: {in_words(rule)}. Next: {compare}")
    return 0


def _calibrated(model: Any, options: Namespace) -> tuple[tuple[float, ...], str]:
    """The calibrated scales, and on which text, in words."""
    from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer
    from hf_recurrent_lengthgen.cli.inputs import load_stream, sequences_of
    from hf_recurrent_lengthgen.cli.measuring import on_device
    from hf_recurrent_lengthgen.surgery import calibrate

    length = options.length or 16 * (model.config.training_length or 0)
    if not length:
        raise ValueError(f"The config of {options.model} has no training_length: give --length.")
    tokenizer = load_tokenizer(options.tokenizer or options.model, options.trust_remote_code)
    stream = load_stream(options.data, options.split, tokenizer, options.text_column)
    texts = sequences_of(stream, options.sequences, length, model.config.training_length or 0)
    result = calibrate(on_device(model, options.device), texts, options.calibrate, seed=options.seed)
    print(f"Loss of {len(texts)} x {length:,} tokens: {result.before:.3f} -> {result.after:.3f} nats per token.")
    if result.after == result.before:
        raise ValueError("No scales lower the loss: give more --sequences, another --length or --data.")
    return tuple(result.scales), f", calibrated on {len(texts)} x {length:,} tokens of {stream.source.description}"
