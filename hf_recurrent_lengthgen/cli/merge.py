"""`lengthgen merge`: a checkpoint of an adapter and its base."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import add_new_folder, add_shared

DESCRIPTION = """\
Add the weights of an adapter (LoRA of PEFT) to its base model and save a whole checkpoint: with code, tokenizer and
the lineage of both. Weights are saved in float32.
"""
EXAMPLES = """\
lengthgen train --model base --lora-r 8 --output adapter
lengthgen merge adapter --output merged
lengthgen merge adapter --base elsewhere/base --output merged
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen merge", DESCRIPTION, EXAMPLES)
    what = "adapter folder of lengthgen train, a trainer or PEFT"
    parser.model.add_argument("adapter", metavar="ADAPTER", help=what)
    parser.model.add_argument("--base", metavar="MODEL", help="base model (default: the one that the adapter names)")
    add_new_folder(parser)
    add_shared(parser, "--trust-remote-code")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    from hf_recurrent_lengthgen.checkpoints.adapters import adapter_of, base_of_adapter, holds_adapter
    from hf_recurrent_lengthgen.checkpoints.adapters import merged as merge_adapter
    from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new, save_checkpoint
    from hf_recurrent_lengthgen.checkpoints.loading import load_model
    from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
    from hf_recurrent_lengthgen.trainers.checks import takes_states

    adapter, output, trust = options.adapter, Path(options.output), options.trust_remote_code
    if not holds_adapter(adapter):
        raise ValueError(f"{adapter} holds no adapter_config.json, so there is nothing to merge.")
    check_new(output)
    base = options.base or base_of_adapter(adapter)
    model = load_model(adapter, trust, base=base, needs_states=False)
    start, checks = lineage_of(adapter), [["lengthgen", "verify", str(output)]] if takes_states(model) else []
    added = adapter_of(model)
    assert added is not None
    layers = ", ".join(added.targets)
    what = f"merged an adapter (LoRA of rank {added.rank}, alpha {added.alpha:g}, on {layers}) into its base"
    command = ["lengthgen", "merge", *arguments]
    save_checkpoint(merge_adapter(model), output, adapter, trust, start, "merge", what, command)
    shown = os.path.relpath(base) if Path(base).resolve().is_relative_to(Path.cwd()) else base
    compare = ["lengthgen", "evaluate", shown, str(output), "--roles", "base,intervention"]
    print(f"Saved to {output}. Next: {', then '.join(map(shlex.join, [*checks, compare]))}")
    return 0
