"""`lengthgen maps`: attention maps of the layers of a checkpoint on a short text."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent_lengthgen.cli.parsing import CommandParser, in_columns, some_tokens
from hf_recurrent_lengthgen.cli.shared_options import MODELS, add_shared

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.metrics import AttentionMaps

MOST_TOKENS = 1024
DESCRIPTION = """\
Show the attention map of each layer on a text (Trockman et al., 2024), the product of its decays (mask), and the
correlation of its B and C projections; softmax attention has its weights. Several models are drawn side by side.
Writes maps.png, and maps.npz (of several models maps-1.npz and so on).
"""
EXAMPLES = """\
lengthgen maps demo-output/base --text "def f(x): return f(x"
lengthgen maps my-copying-model --token-ids 3 7 5 1 3 7 5 --layers 3
lengthgen maps copying-mimetic copying-attention --layers 3 --task-length 20
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen maps", DESCRIPTION, EXAMPLES)
    parser.model.add_argument("models", **MODELS)
    add_shared(parser, "--tokenizer", "--attention-window")
    parser.model.add_argument("--layers", type=int, nargs="+", metavar="N", help="layers, from 0 (default: all)")
    text = parser.data.add_mutually_exclusive_group(required=True)
    what = f"text to read, of up to {MOST_TOKENS} tokens; the picture shows single tokens of some dozens"
    text.add_argument("--text", metavar="TEXT", help=what)
    text.add_argument("--token-ids", type=int, nargs="+", metavar="ID", help="token ids instead of a text")
    string = (
        "number of symbols (of pairs in recall): a string of the task that the models were trained on, and its answer"
    )
    text.add_argument("--task-length", type=some_tokens, metavar="N", help=string)
    add_shared(parser, "--output", "--import", "--trust-remote-code", output="maps")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    import torch

    from hf_recurrent_lengthgen.checkpoints.loading import load_language_model
    from hf_recurrent_lengthgen.cli.inputs import check_distinct
    from hf_recurrent_lengthgen.metrics import attention_maps, save_maps
    from hf_recurrent_lengthgen.metrics.maps.figure import attention_maps_figure
    from hf_recurrent_lengthgen.models.modeling_protocols import base_of
    from hf_recurrent_lengthgen.plotting.images import save_png
    from hf_recurrent_lengthgen.plotting.names import short_names

    check_distinct(options.models)
    how: dict[str, Any] = {"attention_window": options.attention_window}
    models = [base_of(load_language_model(name, options.trust_remote_code, **how)) for name in options.models]
    ids, words = _tokens(options, models)
    if not 0 < len(ids) <= MOST_TOKENS:
        raise ValueError(f"The text has {len(ids)} tokens, but must have 1 to {MOST_TOKENS}.")
    labeled = zip(models, short_names(options.models), strict=True)
    results = [attention_maps(model, torch.tensor(ids), words, options.layers, label) for model, label in labeled]
    several = len(results) > 1
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    for number, maps in enumerate(results, 1):
        save_maps(output / (f"maps-{number}.npz" if several else "maps.npz"), maps)
        print(f"{maps.model}\n{table(maps)}\n" if several else f"{table(maps)}\n")
    save_png(attention_maps_figure(*results), output / "maps.png")
    print(f"Picture: {output / 'maps.png'}, arrays: {output / ('maps-*.npz' if several else 'maps.npz')}")
    return 0


def _tokens(options: argparse.Namespace, models: Sequence[Any]) -> tuple[list[int], list[str]]:
    from hf_recurrent_lengthgen.cli.measuring import shared_tokenizer, task_of
    from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED
    from hf_recurrent_lengthgen.data.tasks.strings import DELIMITER_ID, END_ID
    from hf_recurrent_lengthgen.data.tokens import text_ids

    if options.task_length is not None:
        task = task_of(options.models, models)
        ids = task.resized(options.task_length, 1, EVALUATION_SEED)[0]["input_ids"].tolist()
        return ids, [{DELIMITER_ID: "|", END_ID: "."}.get(token, str(token)) for token in ids]
    if options.token_ids is not None:
        return options.token_ids, [str(token) for token in options.token_ids]
    tokenizer = shared_tokenizer(options)
    ids = text_ids(tokenizer, options.text)
    return ids, [str(tokenizer.decode([token])) for token in ids]


def table(maps: "AttentionMaps") -> str:
    rows: list[Sequence[str]] = [
        ("layer", "kind", "cos(W_B, W_C)", "W_C^T W_B ~ I", "off linear attention", "first token left")
    ]
    for layer in maps.layers:
        values = (layer.cosine, layer.identity, layer.linear_distance, float(layer.mask[-1, 0]))
        rows.append((str(layer.layer), layer.kind, *("-" if value is None else f"{value:.3f}" for value in values)))
    return in_columns(rows)
