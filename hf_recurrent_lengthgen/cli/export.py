"""`lengthgen export`: a checkpoint of this package becomes one of another library."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.conversion.export import code_note, export_checkpoint
from hf_recurrent_lengthgen.conversion.registry import FORMATS

DESCRIPTION = """\
Write a checkpoint of this package in the layout of another library, which then loads it by itself. Weights are copied
bit for bit; the checkpoint stays as it is. What the other library has no name for is refused: states expanded in some
layers, forgetting, attention layers. Carried states and lineage stay behind. For rwkv-hf no library has the class:
its config.json names the code of the repository that the checkpoint was converted from; for one that comes from
elsewhere, the authors' .py files and auto_map are to be added, or fla takes an RWKV-6 for its own.

  lengthgen export trained --format mamba-ssm --output for-mamba-ssm
  lengthgen export trained/checkpoint-500 --format transformers --output stock

Formats:
"""


def _parser() -> argparse.ArgumentParser:
    formats = "\n".join(f"  {name:<14}{format.title}" for name, format in FORMATS.items())
    parser = CommandParser("lengthgen export", description=DESCRIPTION + formats)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder of this package, or Hub name")
    parser.add_argument("--format", choices=FORMATS, required=True, help="the layout to write")
    parser.add_argument("--output", metavar="FOLDER", required=True, help="folder for the result, new or empty")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the Hub (default: main)")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    layout, output = FORMATS[options.format], Path(options.output)
    try:
        export_checkpoint(options.checkpoint, output, options.format, revision=options.revision)
    except KeyboardInterrupt:
        print(f"\nNothing was written to {output}. The same command starts again.")
        raise
    print(f"Exported to {output}, for {layout.title}: {', '.join(sorted(path.name for path in output.iterdir()))}.")
    if note := code_note(layout, output):
        print(note)
    return 0
