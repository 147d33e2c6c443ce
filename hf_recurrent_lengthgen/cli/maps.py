"""`lengthgen maps`: what the layers of a checkpoint look at on a short text, as a picture and as numbers."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from hf_recurrent_lengthgen.cli.inputs import make_output_folder
from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.evaluation.attention_maps import attention_maps
from hf_recurrent_lengthgen.evaluation.map_results import AttentionMaps, save_maps
from hf_recurrent_lengthgen.loading import load_model, load_tokenizer
from hf_recurrent_lengthgen.plotting.attention_maps import attention_maps_figure
from hf_recurrent_lengthgen.plotting.images import save_png

MOST_TOKENS = 1024
DESCRIPTION = """\
Show what each layer looks at on a text (attention maps, arXiv:2410.11135), how far back it can look (mask), and how
its B and C projections are correlated. Writes maps.png and maps.npz.

  lengthgen maps demo-output/base --text "def f(x): return f(x"
  lengthgen maps my-copying-model --token-ids 3 7 5 1 3 7 5 --layers 3
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("lengthgen maps", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder or Hub name of Mamba, GLA or their kin")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--text", help=f"text to run, up to {MOST_TOKENS} tokens; some dozens can be read in the picture"
    )
    text.add_argument("--token-ids", type=int, nargs="+", metavar="ID", help="tokens instead of a text")
    parser.add_argument("--output", default="maps", help="folder for the results (default: %(default)s)")
    parser.add_argument("--layers", type=int, nargs="+", metavar="N", help="layers, counted from 0 (default: all)")
    parser.add_argument("--tokenizer", help='tokenizer folder or name, or "bytes" (default: the model\'s own)')
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that the checkpoint carries")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    ids, words = _tokens(options)
    model: Any = load_model(options.model, options.trust_remote_code, merge=True)
    if not 0 < len(ids) <= MOST_TOKENS:
        raise ValueError(f"The text has {len(ids)} tokens, but must have 1 to {MOST_TOKENS}.")
    if min(ids) < 0 or max(ids) >= model.config.vocab_size:
        raise ValueError(f"Token ids must be from 0 to {model.config.vocab_size - 1}, got {min(ids)} to {max(ids)}.")
    maps = attention_maps(model, torch.tensor(ids), words, options.layers, options.model)
    output = make_output_folder(options.output)
    save_maps(output / "maps.npz", maps)
    save_png(attention_maps_figure(maps), output / "maps.png")
    print(table(maps))
    print(f"\nPicture: {output / 'maps.png'}, arrays: {output / 'maps.npz'}")
    return 0


def _tokens(options: argparse.Namespace) -> tuple[list[int], list[str]]:
    if options.token_ids is not None:
        if options.tokenizer:
            raise ValueError("--tokenizer does nothing beside --token-ids: leave it out.")
        return options.token_ids, [str(token) for token in options.token_ids]
    tokenizer = load_tokenizer(options.tokenizer or options.model, options.trust_remote_code)
    ids = tokenizer(options.text, add_special_tokens=False)["input_ids"]
    return ids, [str(tokenizer.decode([token])) for token in ids]


def table(maps: AttentionMaps) -> str:
    rows = ["layer  kind                    cos(W_B, W_C)  W_C^T W_B ~ I  off linear attention  first token left"]
    for layer in maps.layers:
        values = (layer.cosine, layer.identity, layer.linear_distance, float(layer.mask[-1, 0]))
        texts = ["-" if value is None else f"{value:.3f}" for value in values]
        columns = "  ".join(f"{text:>{width}}" for text, width in zip(texts, (13, 13, 20, 16), strict=True))
        rows.append(f"{layer.layer:>5}  {layer.kind:<22}  {columns}")
    return "\n".join(rows)
