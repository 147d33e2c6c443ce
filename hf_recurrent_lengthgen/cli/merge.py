"""`lengthgen merge`: a checkpoint of an adapter and its base."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.adapters import adapter_of, base_of_adapter, holds_adapter
from hf_recurrent_lengthgen.cli.new_checkpoint import check_new, save_checkpoint, tokenizer_to_copy
from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.lineage import lineage_of, record_step
from hf_recurrent_lengthgen.loading import load_model
from hf_recurrent_lengthgen.verification.comparing import TOLERANCE, difference

DESCRIPTION = """\
Add the weights of an adapter (LoRA of PEFT) to those of its base, and save a whole checkpoint: with code, tokenizer
and the lineage of both. It is read again and must give the logits of adapter and base. Weights are saved in float32.

  lengthgen train --model base --lora-r 8 --output adapter     trains an adapter
  lengthgen merge adapter --output merged                      makes a checkpoint of it
  lengthgen merge adapter --base elsewhere/base --output merged
"""

_READ = 32
"""Tokens that are read to compare logits."""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("lengthgen merge", description=DESCRIPTION)
    parser.add_argument("adapter", metavar="ADAPTER", help="adapter folder: of lengthgen train, a trainer or PEFT")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder for the checkpoint, new or empty")
    parser.add_argument("--base", metavar="MODEL", help="the base, where it is not what the adapter names")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that the base carries")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
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
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(vocabulary, (1, _READ), generator=torch.Generator().manual_seed(0))
    expected = _logits(model, tokens)
    merged = model.merge_and_unload(safe_merge=True)
    del model
    tokenizer = tokenizer_to_copy(adapter, trust)

    def finish(folder: Path) -> None:
        found = difference(_logits(load_model(str(folder), trust), tokens), expected)
        if found > TOLERANCE:
            raise ValueError(
                f"The merged checkpoint does not give the logits of {adapter} on its base: they differ by "
                f"{found:.2g}, allowed is {TOLERANCE:g}. Nothing was written."
            )
        print(f"Logits of {_READ} random tokens: as before to {found:.1g}")
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
