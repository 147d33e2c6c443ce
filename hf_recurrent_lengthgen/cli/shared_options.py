"""Options of several commands: each one has one name, default and help, under one heading."""

import re
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.cli.inputs import STANDARD_LIBRARY
from hf_recurrent_lengthgen.cli.parsing import CommandParser, positive, some_tokens, windows
from hf_recurrent_lengthgen.evaluation.result_cache import default_cache_folder

MODEL = {"metavar": "MODEL", "help": "checkpoint folder or Hub name"}
MODELS = {"nargs": "+", "metavar": "MODEL", "help": "checkpoint folders or Hub names of causal language models"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SHARED: dict[str, dict[str, dict[str, Any]]] = {
    "model": {
        "--tokenizer": {
            "metavar": "NAME",
            "help": 'tokenizer folder or Hub name, or "bytes" (default: the tokenizer of the model)',
        },
        "--training-length": {
            "type": some_tokens,
            "metavar": "T",
            "help": "training length T in tokens, such as 2048 or 2k (default: from the config of the model)",
        },
        "--attention-window": {
            "type": windows,
            "metavar": "W",
            "help": 'of hybrids: number of tokens that a token attends to, itself included, or "none" for all '
            "(default: from the config of the model); evaluate and diagnose compare several, with commas between",
        },
        "--revision": {"metavar": "NAME", "help": "branch, tag or commit on the Hub (default: main)"},
    },
    "data": {
        "--data": {
            "default": STANDARD_LIBRARY,
            "metavar": "DATA",
            "help": f'text: "{STANDARD_LIBRARY}" (the sources of the Python standard library, split by file), a .txt, '
            ".jsonl or .parquet file, a folder of such files or of datasets.save_to_disk, or the Hub name of a data "
            "set (default: %(default)s)",
        },
        "--split": {"metavar": "NAME", "help": "split of the data (default: validation, or the only split)"},
        "--text-column": {
            "default": "text",
            "metavar": "NAME",
            "help": "column that holds the text (default: %(default)s)",
        },
    },
    "run": {
        "--output": {"metavar": "FOLDER", "help": "folder for the results (default: %(default)s)"},
        "--csv": {"action": "store_true", "help": "also write the numbers as a table for spreadsheets"},
        "--device": {
            "default": "cuda" if torch.cuda.is_available() else "cpu",
            "metavar": "DEVICE",
            "help": "device to run on, such as cpu or cuda:1 (default: cuda if available, else cpu)",
        },
        "--dtype": {
            "choices": DTYPES,
            "default": "float32",
            "help": "dtype of the weights; states stay float32 (default: %(default)s)",
        },
        "--batch-size": {
            "type": positive,
            "metavar": "N",
            "help": "sequences in a forward pass (default: what memory limits allow)",
        },
        "--chunk-length": {
            "type": some_tokens,
            "metavar": "N",
            "help": "tokens of each sequence in a forward pass (default: what memory limits allow)",
        },
        "--seed": {"type": int, "default": 0, "metavar": "N", "help": "random seed (default: %(default)s)"},
        "--cache": {
            "metavar": "FOLDER",
            "help": "folder in which results are kept: the same command continues where it was interrupted (default: "
            f"{str(default_cache_folder()).replace(str(Path.home()), '~')})",
        },
        "--no-cache": {"action": "store_true", "help": "neither use nor keep results in the cache"},
        "--trust-remote-code": {
            "action": "store_true",
            "help": "run the Python code that comes with a checkpoint: read it before",
        },
    },
}
"""Heading -> option -> what `add_argument` takes."""
HOW = {name: how for options in SHARED.values() for name, how in options.items()}


def help_of(name: str, default: str) -> str:
    """The help of an option with these words for its default."""
    return re.sub(r"\(default: .*\)", f"(default: {default})", HOW[name]["help"])


def add_shared(parser: CommandParser, *names: str, **defaults: Any) -> None:
    """Add options that other commands have, too, in the order of `SHARED`; some with another default."""
    assert HOW.keys() >= {*names}
    for heading, options in SHARED.items():
        for name in [name for name in options if name in names]:
            action = getattr(parser, heading).add_argument(name, **options[name])
            if action.dest in defaults:
                action.default, action.help = defaults[action.dest], help_of(name, "%(default)s")


def add_new_folder(parser: CommandParser) -> None:
    """Add --output of commands that make a checkpoint."""
    what = "new or empty folder for the checkpoint"
    parser.run.add_argument("--output", required=True, metavar="FOLDER", help=what)
