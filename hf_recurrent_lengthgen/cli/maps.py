"""`lengthgen maps`: what the layers of a checkpoint look at on a short text, as a picture and as numbers."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from hf_recurrent_lengthgen.checkpoints.loading import load_model, load_tokenizer
from hf_recurrent_lengthgen.cli.inputs import make_output_folder
from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import MODEL, add_shared
from hf_recurrent_lengthgen.metrics.maps.figure import attention_maps_figure
from hf_recurrent_lengthgen.metrics.maps.measure import attention_maps
from hf_recurrent_lengthgen.metrics.maps.result import AttentionMaps, save_maps
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.names import short_names

MOST_TOKENS = 1024
DESCRIPTION = """\
Show what each layer of a model looks at on a text (attention maps of Trockman et al., 2024), how far back it can look
(mask), and how its B and C projections are correlated. Writes maps.png and maps.npz.
"""
EXAMPLES = """\
lengthgen maps demo-output/base --text "def f(x): return f(x"
lengthgen maps my-copying-model --token-ids 3 7 5 1 3 7 5 --layers 3
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen maps", DESCRIPTION, EXAMPLES)
    parser.model.add_argument("model", **MODEL)
    add_shared(parser, "--tokenizer")
    parser.model.add_argument("--layers", type=int, nargs="+", metavar="N", help="layers, from 0 (default: all)")
    text = parser.data.add_mutually_exclusive_group(required=True)
    what = f"text to read, of up to {MOST_TOKENS} tokens; the picture shows single tokens of some dozens"
    text.add_argument("--text", metavar="TEXT", help=what)
    text.add_argument("--token-ids", type=int, nargs="+", metavar="ID", help="token ids instead of a text")
    add_shared(parser, "--output", "--trust-remote-code", output="maps")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    ids, words = _tokens(options)
    model: Any = base_of(load_model(options.model, options.trust_remote_code, merge=True))
    if not 0 < len(ids) <= MOST_TOKENS:
        raise ValueError(f"The text has {len(ids)} tokens, but must have 1 to {MOST_TOKENS}.")
    if min(ids) < 0 or max(ids) >= model.config.vocab_size:
        raise ValueError(f"Token ids must be from 0 to {model.config.vocab_size - 1}, got {min(ids)} to {max(ids)}.")
    [label] = short_names([options.model])
    maps = attention_maps(model, torch.tensor(ids), words, options.layers, label)
    output = make_output_folder(options.output)
    save_maps(output / "maps.npz", maps)
    save_png(attention_maps_figure(maps), output / "maps.png")
    print(table(maps))
    print(f"\nPicture: {output / 'maps.png'}, arrays: {output / 'maps.npz'}")
    return 0


def _tokens(options: argparse.Namespace) -> tuple[list[int], list[str]]:
    if options.token_ids is not None:
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
