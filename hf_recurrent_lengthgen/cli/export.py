"""`lengthgen export`: a checkpoint of this package becomes one of another library."""

from collections.abc import Sequence
from pathlib import Path

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import FORMATS, TITLES, add_new_folder, add_shared

DESCRIPTION = """\
Write a checkpoint of this package in the layout of another library, which then loads it by itself. Weights are copied
bit for bit, and the checkpoint stays unchanged. Refused is what the other library cannot represent: states expanded in
some layers, forgetting, attention layers. Carried states and lineage are not exported.

A hybrid needs no export: it is in the layout of Transformers, which ignores its attention_window.

For rwkv-hf no library has the class: add the .py files and the auto_map of the authors' repositories, or export an
RWKV-6 for fla; rwkv7-hf is only read. Formats:

"""
EXAMPLES = """\
lengthgen export trained --format mamba-ssm --output for-mamba-ssm
lengthgen export trained/checkpoint-500 --format transformers --output stock
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen export", DESCRIPTION + TITLES, EXAMPLES, method="conversion")
    what = "checkpoint folder or Hub name, of this package"
    parser.model.add_argument("checkpoint", metavar="CHECKPOINT", help=what)
    add_shared(parser, "--revision")
    what = "layout to write, see above"
    parser.method.add_argument("--format", choices=FORMATS, required=True, metavar="FORMAT", help=what)
    add_new_folder(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint

    output = Path(options.output)
    export_checkpoint(options.checkpoint, output, options.format, revision=options.revision)
    print(f"Exported to {output}, for {options.format}: {', '.join(sorted(path.name for path in output.iterdir()))}.")
    return 0
