"""`lengthgen state`: read a long text once, store the state in files, and answer prompts from it."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.cli.parsing import CommandParser, in_columns, some_tokens
from hf_recurrent_lengthgen.cli.shared_options import MODEL, add_shared

DESCRIPTION = """\
Read a long text once, store the state of the model (a text state), and answer prompts from it, also in other processes
and on other machines. A text state is the state of the recurrent layers, of one size for every text, and the keys and
values of attention layers, if the model has any. A file belongs to the weights and the tokenizer that made it; other
ones are refused.
"""
EXAMPLES = """\
lengthgen state read demo-output/state-passing --data book.txt --every 10000 --output book
lengthgen state show book
lengthgen state ask book demo-output/state-passing --prompt "Who is" --prompt "Where is"
lengthgen state ask book demo-output/state-passing --prompt "Who is" --position 50000
lengthgen state mix book another-book --weights 0.5 0.5 --output both.safetensors
"""
READ = """\
Read a text and save the state after every N tokens, one file each, into a folder. Memory grows with the text only
for keys and values of attention layers. The same command continues after the last file if it was interrupted, or if
the text has grown at its end.
"""
ASK = """\
Continue prompts after the text that was read. The answers are those of the model after reading text and prompt at
once. After independent chunks, the answer is that of the chunk whose next token has the lowest entropy. The file stays
as it is.
"""
STATE = {"metavar": "STATE", "help": "state file, or a folder of them, whose last one is taken"}


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen state", DESCRIPTION, EXAMPLES)
    add_action = parser.add_actions("read", "show", "ask", "mix")
    what = "read a text, and save the state after every N tokens"
    read = add_action(
        "read", what, "lengthgen state read demo-output/state-passing --data book.txt --output book", READ
    )
    read.model.add_argument("model", **MODEL)
    read.data.add_argument("--length", type=some_tokens, metavar="N", help="tokens to read at most (default: all)")
    what = "tokens between two files (default: 65536)"
    read.method.add_argument("--every", type=some_tokens, metavar="N", help=what)
    what = "read chunks of N tokens independently, into one file (default: the whole text)"
    read.method.add_argument("--independent-chunks", type=some_tokens, metavar="N", help=what)
    read.method.add_argument("--transitions", action="store_true", help="also save what mix --order requires")
    read.run.add_argument("--output", required=True, metavar="FOLDER", help="folder for the files")
    add_shared(read, "--tokenizer", "--data", "--split", "--text-column", "--chunk-length")
    show = add_action("show", "show the contents of a state file", "lengthgen state show book")
    ask = add_action("ask", "continue prompts after a text that was read", EXAMPLES.splitlines()[2], ASK)
    what = "make one state file of several: their weighted sum, or nearly the state after reading all texts in turn"
    mix = add_action("mix", what, EXAMPLES.splitlines()[4])
    mix.data.add_argument("states", nargs="+", **STATE)
    mix.method.add_argument("--weights", type=float, nargs="+", metavar="W", help="one for each (default: the mean)")
    what = "compose files read with --transitions: in their order (listed), or the mean over rotations or all orders"
    mix.method.add_argument("--order", choices=("listed", "cyclic", "all"), help=what)
    mix.run.add_argument("--output", required=True, metavar="FILE", help="state file to write")
    for action in (show, ask):
        action.data.add_argument("state", **STATE)
    ask.model.add_argument("model", **MODEL)
    what = "prompt to continue; may be repeated"
    ask.data.add_argument("--prompt", action="append", required=True, metavar="TEXT", help=what)
    what = "tokens of each answer at most (default: %(default)s)"
    ask.method.add_argument("--max-new-tokens", type=some_tokens, default=40, metavar="N", help=what)
    add_shared(ask, "--tokenizer")
    what = "take the text state at this position, or the nearest one before it (default: the last)"
    ask.data.add_argument("--position", type=some_tokens, metavar="N", help=what)
    for action in (read, ask):
        add_shared(action, "--attention-window", "--device", "--dtype", "--trust-remote-code")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    {"read": _read, "show": _show, "ask": _ask, "mix": _mix}[options.action](options)
    return 0


def _model_and_tokenizer(options: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    from hf_recurrent_lengthgen.checkpoints.loading import load_model, load_tokenizer
    from hf_recurrent_lengthgen.cli.measuring import on_device

    trust = options.trust_remote_code
    tokenizer = load_tokenizer(options.tokenizer or options.model, trust)
    how: dict[str, Any] = {"merge": True, "attention_window": options.attention_window}
    model = load_model(options.model, trust, getattr(torch, options.dtype), **how)
    return on_device(model.eval(), options.device), tokenizer


def _read(options: argparse.Namespace) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]

    from hf_recurrent_lengthgen.cli.inputs import chosen_split, load_documents
    from hf_recurrent_lengthgen.data import token_stream
    from hf_recurrent_lengthgen.data.tokens import text_prefix
    from hf_recurrent_lengthgen.state_files import positions_in, read_chunks, read_into, save_text_state
    from hf_recurrent_lengthgen.state_files.files import file_at

    model, tokenizer = _model_and_tokenizer(options)
    split = chosen_split(options.data, options.split, "validation")
    documents = load_documents(options.data, split, options.text_column)
    tokens = token_stream(documents, tokenizer)[:-1][: options.length]  # no end of text at the end: a prompt follows
    if not len(tokens):
        raise ValueError(f"{options.data} is empty: give a text.")
    positions = positions_in(options.output)
    reading: Any = {"tokenizer": tokenizer, "chunk_length": options.chunk_length}
    if options.independent_chunks:
        if positions or options.every or options.transitions:
            raise ValueError("--independent-chunks writes one file into a new folder: no --every, no --transitions.")
        before = text_prefix(tokenizer)
        chunks = read_chunks(model, tokens[len(before) :], options.independent_chunks, before=before, **reading)
        save_text_state(file_at(options.output, chunks.position), chunks)
        print(f"Read {chunks.rows:,} chunks of {len(tokens):,} tokens into {chunks.nbytes:,} bytes: {options.output}")
        return
    reading["transitions"] = options.transitions
    text_states = read_into(options.output, model, tokens, options.every or 65536, **reading)
    with tqdm(total=len(tokens), unit="tok", unit_scale=True, disable=None) as bar:
        for text_state in text_states:
            if positions and text_state.position == positions[-1] < len(tokens):
                bar.write(f"Continues after {positions[-1]:,} tokens, the last file in {options.output}.")
            bar.update(text_state.position - bar.n)
    size = sum(file.stat().st_size for file in Path(options.output).glob("position-*.safetensors"))
    count = len(positions_in(options.output))
    done = "Already read" if positions and positions[-1] >= len(tokens) else "Read"
    print(f"{done}: {len(tokens):,} tokens, {count} file{'s' * (count > 1)}, {size:,} bytes, in {options.output}")


def _show(options: argparse.Namespace) -> None:
    from hf_recurrent_lengthgen.state_files import load_text_state, positions_in

    text_state = load_text_state(options.state)
    origin, rows = text_state.origin, [["position", f"{text_state.position:,} tokens"]]
    if positions := positions_in(options.state):
        rows.append(["all positions", ", ".join(f"{position:,}" for position in positions)])
    keys = ", ".join(
        f"{layer.keys.shape[2]:,} tokens in layer {index}" for index, layer in sorted(text_state.keys.items())
    )
    rows += [
        ["memory", f"{text_state.nbytes:,} bytes"],
        *([["chunks", f"{text_state.rows:,}"]] if text_state.rows > 1 else []),
        ["attention", keys or "no such layers"],
        ["transitions", f"of {len(text_state.transitions)} layers" if text_state.transitions else "none"],
        ["model", f"{origin.name} ({origin.config.get('model_type')}, {origin.dtype})"],
        ["revision", origin.revision or "unknown"],
        ["SHA-256 of the weights", origin.weights],
        ["SHA-256 of the tokenizer", origin.tokenizer or "unknown"],
        ["digest of the tokens", text_state.prefix or "unknown"],
    ]
    print(in_columns([*rows, *sorted([name, value] for name, value in text_state.metadata.items())]))


def _mix(options: argparse.Namespace) -> None:
    from hf_recurrent_lengthgen.state_files import load_text_state, mix_text_states, save_text_state

    loaded = [(Path(path).name, load_text_state(path)) for path in options.states]
    named = [replace(one, metadata={"file": name, **one.metadata}) for name, one in loaded]
    mixed = mix_text_states(named, options.weights, options.order)
    save_text_state(options.output, mixed)
    print(f"Mixed {len(named)} text states, {mixed.position:,} tokens in all: {options.output}")


def _ask(options: argparse.Namespace) -> None:
    import torch

    from hf_recurrent_lengthgen.state_files import ask_surest, load_text_state

    model, tokenizer = _model_and_tokenizer(options)
    text_state = load_text_state(options.state, model, tokenizer, position=options.position)
    for prompt in options.prompt:
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        answer, row, bits = ask_surest(model, text_state, ids, max_new_tokens=options.max_new_tokens, do_sample=False)
        where = f" (chunk {row + 1} of {text_state.rows}, {bits[row]:.2f} bits)" if text_state.rows > 1 else ""
        print(f"{prompt!r}: {tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)!r}{where}")
