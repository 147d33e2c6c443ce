"""The command line: `lengthgen COMMAND`, one file for each command."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module

from safetensors import SafetensorError

from hf_recurrent_lengthgen.cli.parsing import CommandParser, suggestion
from hf_recurrent_lengthgen.versions import installed_versions

# Names of modules beside this one, too, which are imported when they are run: that takes long.
COMMANDS = {
    "demo": "train a small model, see it fail, cure it, get a report (about five minutes)",
    "train": "train or post-train a checkpoint, from a YAML file or flags",
    "evaluate": "measure checkpoints beyond their training length",
    "diagnose": "the same, and why they fail: which states drift, what is remembered",
    "accuracy": "measure checkpoints that copy, recall or sort symbols",
    "expand": "give some layers of a checkpoint larger states, to be post-trained",
    "forget": "make a copy of a checkpoint that forgets more, without training",
    "merge": "make a checkpoint of an adapter (LoRA) and its base",
    "maps": "show what the layers of a checkpoint look at",
    "retrieve": "measure whether checkpoints find what stands far back in a text",
    "harness": "run the tasks of lm-evaluation-harness, and groups of them from the papers",
    "convert": "make a checkpoint of mamba-ssm, fla, RWKV or Transformers one that takes states",
    "export": "write a checkpoint in the layout of another library",
    "verify": "check a checkpoint: without this package, in pieces, against its source",
    "card": "write the model card of a checkpoint, from its records and results",
    "push": "push a checkpoint to the Hub as one commit",
    "pull": "get a checkpoint from the Hub, at a commit, checked",
    "recipe": "post-trained checkpoints of the papers: convert, train, measure, publish in one command",
}
GOES_ON = ("push", "pull", "recipe")
"""Commands that keep what they have done when they are interrupted, and do not say so themselves."""
DESCRIPTION = """\
Recurrent language models that keep working far beyond the length they were trained on.

{commands}

lengthgen COMMAND --help lists the options of a command. A first session:

  lengthgen demo --output demo-output
  lengthgen evaluate demo-output/base demo-output/cured --output comparison
""".format(commands="\n".join(f"  lengthgen {name:<10} {what}" for name, what in COMMANDS.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = CommandParser("lengthgen", description=DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error (before COMMAND)")
    parser.add_argument("--version", action="version", version=_versions(), help="show versions, for bug reports")
    parser.add_argument("command", metavar="COMMAND", help=" | ".join(COMMANDS))
    own = next((index for index, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    parsed = parser.parse_args(arguments[: own + 1])
    if (name := parsed.command) not in COMMANDS:
        parser.error(f"invalid choice: {name!r} (choose from {', '.join(COMMANDS)}){suggestion(name, COMMANDS)}")
    try:
        from hf_recurrent_lengthgen.cli.inputs import quiet_libraries

        command = import_module(f"hf_recurrent_lengthgen.cli.{name}")
        # A log has no use for bars.
        with contextlib.nullcontext() if sys.stderr.isatty() else quiet_libraries("bars"):
            return int(command.run(arguments[own + 1 :]))
    except (ValueError, OSError, SafetensorError) as error:  # the last is what saving to a full disk raises
        if parsed.debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"lengthgen {name}: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        hint = ": the same command goes on with what is left" if name in GOES_ON else ""
        print(f"lengthgen {name}: interrupted{hint}", file=sys.stderr)
        return 130


def _versions() -> str:
    versions = installed_versions()
    own = versions.pop("hf_recurrent_lengthgen")
    return f"lengthgen {own} ({', '.join(f'{name} {version}' for name, version in versions.items())})"


if __name__ == "__main__":
    sys.exit(main())
