"""Options of several commands: each one has one name, default and help, under one heading."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, TypeVar

from hf_recurrent_lengthgen.cli.parsing import CommandParser, ImportUserCode, positive, some_tokens, windows
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings

Settings = TypeVar("Settings", bound=EvaluationSettings)
TEXT: Any = str | None
"""Type of a setting that is a text, and not a list of names."""
STANDARD_LIBRARY = "stdlib"
FORMATS = {
    "mamba-ssm": "mamba-ssm, the library of the Mamba authors",
    "rwkv": "the .pth files of RWKV's author",
    "rwkv-hf": "the RWKV authors' repositories for Transformers",
    "rwkv7-hf": "the RWKV-7 authors' layout for Transformers",
    "fla": "flash-linear-attention",
    "transformers": "the Mamba, Mamba-2 and FalconMamba of Transformers",
}
"""Names and titles of `checkpoints.conversion.registry.FORMATS`, which take torch to import."""
TITLES = "\n".join(f"  {name:<14}{title}" for name, title in FORMATS.items())
MODEL_OPTIONS = (
    *("--tokenizer", "--training-length", "--attention-window"),
    *("--device", "--dtype", "--cache", "--no-cache", "--import", "--trust-remote-code"),
)
"""How models are loaded and run, and where results are cached."""
MODEL = {"metavar": "MODEL", "help": "checkpoint folder or Hub name"}
MODELS = {"nargs": "+", "metavar": "MODEL", "help": "checkpoint folders or Hub names of causal language models"}
DTYPES = ("float32", "bfloat16", "float16")


def _how(metavar: str, text: str, **options: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": text, **options}


SHARED: dict[str, dict[str, dict[str, Any]]] = {
    "model": {
        "--tokenizer": _how("NAME", 'tokenizer folder or Hub name, or "bytes" (default: the tokenizer of the model)'),
        "--training-length": _how(
            "T",
            "training length T in tokens, such as 2048 or 2k (default: from the config of the model)",
            type=some_tokens,
        ),
        "--attention-window": _how(
            "W",
            'of hybrids: number of tokens that a token attends to, itself included, or "none" for all '
            "(default: from the config of the model)",
            type=windows,
        ),
        "--revision": _how("NAME", "branch, tag or commit on the Hub (default: main)"),
    },
    "data": {
        "--data": _how(
            "DATA",
            f'text: "{STANDARD_LIBRARY}" (the sources of the Python standard library, split by file), a .txt, '
            ".jsonl or .parquet file, a folder of such files or of datasets.save_to_disk, or the Hub name of a data "
            "set (default: %(default)s)",
            default=STANDARD_LIBRARY,
        ),
        "--split": _how("NAME", "split of the data (default: validation, or the only split)"),
        "--text-column": _how("NAME", "column that holds the text (default: %(default)s)", default="text"),
    },
    "run": {
        "--output": _how("FOLDER", "folder for the results (default: %(default)s)"),
        "--csv": {"action": "store_true", "help": "also write the numbers as a table for spreadsheets"},
        "--device": _how("DEVICE", "device to run on, such as cpu or cuda:1 (default: cuda if available, else cpu)"),
        "--dtype": {
            "choices": DTYPES,
            "default": "float32",
            "help": "dtype of the weights; states stay float32 (default: %(default)s)",
        },
        "--batch-size": _how("N", "sequences in a forward pass (default: what memory limits allow)", type=positive),
        "--chunk-length": _how(
            "N", "tokens of each sequence in a forward pass (default: what memory limits allow)", type=some_tokens
        ),
        "--seed": _how("N", "random seed (default: %(default)s)", type=int, default=0),
        "--cache": _how(
            "FOLDER",
            "folder for cached results: the same command continues where it was interrupted (default: "
            "$LENGTHGEN_CACHE, or hf_recurrent_lengthgen in $XDG_CACHE_HOME or ~/.cache)",
        ),
        "--no-cache": {"action": "store_true", "help": "neither read nor write the cache"},
        "--import": _how(
            "MODULE",
            "Python file or installed module with own metrics or model families; may be repeated",
            action=ImportUserCode,
        ),
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


def add_options(parser: CommandParser, settings: type[EvaluationSettings], output: str, sequences: int) -> None:
    """Add the options that `load_inputs` reads, and those of the settings."""
    several = "; a folder of checkpoints seed0, seed1, ... is a method with several seeds"
    parser.model.add_argument("models", **MODELS | {"help": MODELS["help"] + several})
    what = "role of each model: base, intervention, control or other; pages compare intervention and control with base"
    parser.model.add_argument("--roles", metavar="ROLE,...", help=what)
    add_shared(parser, "--data", "--split", "--text-column")
    what = "tokens per sequence, such as 65536, 64k or 1M (default: 64 T)"
    parser.data.add_argument("--length", type=some_tokens, metavar="N", help=what)
    what = "number of sequences (default: %(default)s)"
    parser.data.add_argument("--sequences", type=positive, default=sequences, metavar="N", help=what)
    fields = {f"--{field.name.replace('_', '-')}": field for field in _options_of(settings)}
    add_shared(parser, *MODEL_OPTIONS, "--output", "--csv", *HOW.keys() & fields.keys(), output=output)
    window: Any = parser._option_string_actions["--attention-window"]
    window.help += "; several with commas between are compared"
    for name, field in fields.items():
        if name not in HOW:
            kind, metavar = {int: (int, "N"), TEXT: (None, "TEXT")}.get(field.type, (None, "NAME,..."))
            parser.method.add_argument(name, type=kind, default=field.default, metavar=metavar, **field.metadata)


def _options_of(settings: type[EvaluationSettings]) -> list[Field[Any]]:
    return [field for field in fields(settings) if "help" in field.metadata]


def settings_of(settings: type[Settings], options: argparse.Namespace, command: Sequence[str]) -> Settings:
    """The settings from the options of a command; options of several names have commas between them."""
    values = {field.name: getattr(options, field.name) for field in _options_of(settings)}
    for field in _options_of(settings):
        if isinstance(value := values[field.name], str) and field.type != TEXT:
            values[field.name] = tuple(filter(None, (one.strip() for one in value.split(","))))
    return settings(**values, command=shlex.join(command), progress=sys.stderr.isatty())
