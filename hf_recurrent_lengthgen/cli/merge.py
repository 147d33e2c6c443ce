"""`lengthgen merge`: a checkpoint of an adapter and its base."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.checkpoints.adapters import adapter_of, base_of_adapter, holds_adapter
from hf_recurrent_lengthgen.checkpoints.adapters import merged as merge_adapter
from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.checkpoints.records import record_step
from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
from hf_recurrent_lengthgen.checkpoints.verification.verify import TOLERANCE, difference
from hf_recurrent_lengthgen.cli.new_checkpoint import check_new, save_checkpoint, tokenizer_to_copy
from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import add_new_folder, add_shared

DESCRIPTION = """\
Add the weights of an adapter (LoRA of PEFT) to its base model and save a whole checkpoint: with code, tokenizer and
the lineage of both. The checkpoint is loaded again and must give the logits of adapter and base. Weights are saved in
float32.
"""
EXAMPLES = """\
lengthgen train --model base --lora-r 8 --output adapter
lengthgen merge adapter --output merged
lengthgen merge adapter --base elsewhere/base --output merged
"""

_READ = 32
"""Random tokens on which logits are compared."""


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
    adapter, output, trust = options.adapter, Path(options.output), options.trust_remote_code
    if not holds_adapter(adapter):
        raise ValueError(f"{adapter} holds no adapter_config.json, so there is nothing to merge.")
    check_new(output)
    base = options.base or base_of_adapter(adapter)
    model = load_model(adapter, trust, base=base)
    start = lineage_of(adapter)
    added = adapter_of(model)
    assert added is not None
    layers = ", ".join(added.targets)
    what = f"merged an adapter (LoRA of rank {added.rank}, alpha {added.alpha:g}, on {layers}) into its base"
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(vocabulary, (1, _READ), generator=torch.Generator().manual_seed(0))
    expected = _logits(model, tokens)
    merged = merge_adapter(model)
    del model
    tokenizer = tokenizer_to_copy(adapter, trust)

    def finish(folder: Path) -> None:
        change = difference(_logits(load_model(str(folder), trust), tokens), expected)
        if change > TOLERANCE:
            raise ValueError(
                f"The merged checkpoint does not give the logits of {adapter} on its base: they differ by "
                f"{change:.2g}, allowed is {TOLERANCE:g}. Nothing was written."
            )
        print(f"Logits of {_READ} random tokens: unchanged to {change:.1g}")
        record_step(folder, start, "merge", what, ["lengthgen", "merge", *arguments])

    save_checkpoint(merged, tokenizer, output, finish)
    shown = os.path.relpath(base) if Path(base).resolve().is_relative_to(Path.cwd()) else base
    compare = shlex.join(["lengthgen", "evaluate", shown, str(output), "--roles", "base,cured"])
    print(f"Saved to {output}. Next: {shlex.join(['lengthgen', 'verify', str(output)])}, then {compare}")
    return 0


@torch.no_grad()
def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens).logits
    return logits
