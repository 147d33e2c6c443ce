"""`lengthgen convert`: convert a checkpoint of another library to this package."""

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import DTYPES, FORMATS, HOW, TITLES, add_new_folder, add_shared, help_of

DESCRIPTION = """\
Convert a checkpoint of another library into one of this package, which accepts an initial state, returns the final
state, can be post-trained, and loads in Transformers anywhere, because it contains its code. Weights are copied bit
for bit, tensor by tensor, so little memory is needed. The source stays unchanged; lineage.json names it. The format is
detected:

"""
EXAMPLES = """\
lengthgen convert state-spaces/mamba2-130m --output mamba2 --tokenizer EleutherAI/gpt-neox-20b
lengthgen convert tiiuae/falcon-mamba-7b --output falcon --revision main
lengthgen convert my-training-run/model.pth --output converted
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen convert", DESCRIPTION + TITLES, EXAMPLES, method="conversion")
    what = "checkpoint folder, .pth file, or Hub name: owner/name, or owner/name/file.pth for one file"
    parser.model.add_argument("source", metavar="SOURCE", help=what)
    known = "known for official Mamba and Mamba-2 checkpoints, else left open"
    for name, default in (("--tokenizer", "that of SOURCE"), ("--training-length", known)):
        parser.model.add_argument(name, **HOW[name] | {"help": help_of(name, default)})
    add_shared(parser, "--revision")
    what = "format of SOURCE (default: detected)"
    parser.method.add_argument("--format", choices=FORMATS, metavar="FORMAT", help=what)
    what = (
        "a setting of the model that SOURCE lacks, as in --set head_size_divisor=1; VALUE is JSON, or a word; may be "
        "repeated"
    )
    parser.method.add_argument("--set", action="append", type=_setting, default=[], metavar="NAME=VALUE", help=what)
    what = "dtype of all weights in the result (default: that of each tensor in SOURCE)"
    parser.method.add_argument("--dtype", choices=DTYPES, help=what)
    add_new_folder(parser)
    return parser


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, such as head_size_divisor=1, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
    from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer
    from hf_recurrent_lengthgen.checkpoints.private_text import portable_command

    output = Path(options.output)
    convert_checkpoint(
        options.source,
        output,
        revision=options.revision,
        format=options.format,
        dtype=options.dtype,
        tokenizer=load_tokenizer("bytes") if options.tokenizer == "bytes" else options.tokenizer,
        training_length=options.training_length,
        overrides=dict(options.set),
        command=portable_command(["lengthgen", "convert", *arguments]),
    )
    print(_summary(output))
    return 0


def _summary(output: Path) -> str:
    """The message after a conversion: what was written, and what is missing."""
    from transformers import PreTrainedConfig

    from hf_recurrent_lengthgen.checkpoints.conversion import registry
    from hf_recurrent_lengthgen.checkpoints.conversion.export import our_config
    from hf_recurrent_lengthgen.checkpoints.conversion.formats import user_overrides
    from hf_recurrent_lengthgen.checkpoints.conversion.tokenizer_files import tokenizer_files
    from hf_recurrent_lengthgen.checkpoints.records import read_lineage
    from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles

    lineage = read_lineage(output)
    assert lineage is not None and lineage.source is not None  # noqa: PT018
    source = lineage.source
    files = TensorFiles(output)
    parameters = sum(math.prod(meta.shape) for meta in files.metas.values())
    lines = [
        f"Converted {source.name} ({source.format}{f', revision {source.revision}' if source.revision else ''}, "
        f"licence {source.license or 'not stated'}): {parameters:,} parameters in {len(files.paths)} file(s)."
    ]
    settings, layout = PreTrainedConfig.get_config_dict(output)[0], registry.FORMATS[source.format]
    config = our_config(settings, str(output))
    overrides = user_overrides(config)
    if assumed := {name: value for name, value in layout.assumed(config).items() if name not in overrides}:
        values = ", ".join(f"{name} {value}" for name, value in assumed.items())
        example = f"--set {next(iter(assumed))}=VALUE"
        lines.append(f"Its files lack some settings: assumed {values}. If that is wrong, give {example}.")
    if not tokenizer_files(output):
        official = layout.tokenizer if layout.tokenizer_ids in (None, config.vocab_size) else ""
        advice = f" That of the official checkpoints is {official}: --tokenizer {official}." if official else ""
        lines.append(f"{source.name} holds no tokenizer, so {output} has none.{advice}")
    if settings.get("training_length") is None:
        lines.append(
            f"The training length of {source.name} is not known, which evaluation needs: give --training-length here, "
            "or to each evaluation."
        )
    lines.append(f"Saved to {output}. Next: {shlex.join(['lengthgen', 'verify', str(output)])}")
    return "\n".join(lines)
