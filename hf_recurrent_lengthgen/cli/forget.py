"""`lengthgen forget`: a copy of a checkpoint that forgets more at inference than it has learned to."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.cli.parsing import CommandParser, some_tokens
from hf_recurrent_lengthgen.cli.shared_options import add_new_folder, add_shared

DESCRIPTION = """\
Make a copy of a checkpoint that forgets at inference, without training (Chen et al., 2024): its states hold the last
tokens only (--window), keep and take in less (--retention and --insertion; the paper takes 0.9999 and 0.75), or take
smaller steps (--delta-scale, as LongMamba). All are for Mamba-2, --delta-scale for Mamba-1, too; other families
and hybrids are refused. The weights stay unchanged; the config of the copy says how it forgets.
"""
EXAMPLES = """\
lengthgen forget demo-output/base --output forgets --window 128
lengthgen forget my-mamba2 --output forgets --retention 0.9999 --insertion 0.75
lengthgen evaluate my-mamba2 forgets
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen forget", DESCRIPTION, EXAMPLES, method="forgetting")
    what = "checkpoint folder or Hub name: ours, or a stock one of these families; hybrids are refused"
    parser.model.add_argument("model", metavar="MODEL", help=what)
    add = parser.method.add_argument
    add("--window", type=some_tokens, metavar="N", help="tokens that the state of each layer holds")
    add("--retention", type=float, default=1.0, metavar="X", help="factor on the decays, above 0 and at most 1")
    add("--insertion", type=float, default=1.0, metavar="X", help="factor on what is written into the state")
    add("--delta-scale", type=float, default=1.0, metavar="X", help="factor on the step sizes of Mamba, at most 1")
    add_new_folder(parser)
    add_shared(parser, "--trust-remote-code")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    import torch
    from transformers import PreTrainedConfig

    from hf_recurrent_lengthgen.checkpoints.adapters import refuse_adapter
    from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new, save_checkpoint
    from hf_recurrent_lengthgen.checkpoints.loading import load_model
    from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
    from hf_recurrent_lengthgen.evaluation.streaming import state_elements
    from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting, forgetting, in_words

    rule = Forgetting(options.retention, options.insertion, options.window, options.delta_scale)
    refuse_adapter(options.model)
    output = Path(options.output)
    check_new(output)
    if rule == Forgetting():
        raise ValueError("Nothing would be forgotten: give --window, --retention, --insertion or --delta-scale.")
    values, _ = PreTrainedConfig.get_config_dict(options.model)
    dtype = getattr(torch, str(values.get("dtype") or values.get("torch_dtype") or "float32"), torch.float32)
    model: Any = load_model(options.model, options.trust_remote_code, dtype)  # weights stay in their dtype
    if (before := Forgetting.of(model.config)) != Forgetting():
        raise ValueError(
            f"{options.model} forgets already ({in_words(before)}): give the checkpoint that it was made from."
        )
    plain = state_elements(model)
    with forgetting(model, **rule.changed()):
        done = [*(getattr(model.config, "interventions", None) or ()), f"forgetting at inference: {in_words(rule)}"]
        model.config.interventions = done
        given = options.model, options.trust_remote_code
        command = ["lengthgen", "forget", *arguments]
        save_checkpoint(model, output, *given, lineage_of(options.model), "forget", done[-1], command)
        if rule.window is not None:
            print(f"State of a sequence: {plain:,} -> {state_elements(model):,} numbers.")
    remote = ["--trust-remote-code"] if options.trust_remote_code else []
    compare = shlex.join(["lengthgen", "evaluate", options.model, str(output), *remote])
    print(f"Saved to {output}: {in_words(rule)}. Next: {compare}")
    return 0
