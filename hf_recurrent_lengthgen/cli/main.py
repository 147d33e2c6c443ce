"""The command line: `lengthgen COMMAND`, with one file for each command."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from safetensors import SafetensorError

from hf_recurrent_lengthgen.cli.parsing import CommandParser, suggestion
from hf_recurrent_lengthgen.versions import installed_versions

PURPOSES = {
    "Train and change models": {
        "demo": "train a small model, see it fail, cure it (7 to 9 minutes)",
        "train": "train or post-train a checkpoint, from flags or a YAML file",
        "expand": "give layers of a checkpoint larger states, to be post-trained",
        "forget": "make a checkpoint forget more at inference, without training",
        "merge": "make a checkpoint of an adapter (LoRA) and its base",
    },
    "Measure": {
        "evaluate": "loss and harm of context beyond the training length",
        "diagnose": "the same, and why: which states drift, what is remembered",
        "retrieve": "whether models find what stands far back in a text",
        "accuracy": "how many symbols models copy, recall or sort right",
        "maps": "what the layers of a model look at",
        "harness": "tasks of lm-evaluation-harness, and of the papers",
    },
    "Read once, ask often": {
        "state": "keep what a model has read in files, and ask them",
    },
    "Convert and publish": {
        "convert": "make a checkpoint of another library one that takes states",
        "export": "write a checkpoint in the layout of another library",
        "verify": "check that a checkpoint works without this package",
        "card": "write the model card of a checkpoint",
        "push": "push a checkpoint to the Hub as one commit",
        "recipe": "training runs of papers, as files for train",
    },
}
COMMANDS = {name: what for commands in PURPOSES.values() for name, what in commands.items()}
"""Modules beside this one, which take long to import, so that only the one that runs is imported."""
CONTINUED = ("convert", "evaluate", "diagnose", "push", "retrieve", "state")
"""Commands that keep what they have done when they are interrupted."""
HELPS = Path(__file__).with_name("help.txt")
"""The helps of commands, each below its `HELP_HEADING`; their parsers take seconds to import (`tests.cli.helps`)."""
HELP_HEADING = "==== {} ====\n"
DESCRIPTION = "\n\n".join(
    ["Recurrent language models that keep working far beyond the length they were trained on."]
    + [
        "\n".join([f"{purpose}:", *(f"  {name:<10}  {what}" for name, what in commands.items())])
        for purpose, commands in PURPOSES.items()
    ]
)
EXAMPLES = """\
lengthgen demo
lengthgen evaluate demo-output/base demo-output/cured --roles base,cured
lengthgen evaluate --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_parser()
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    own = next((index for index, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    parsed = parser.parse_args(arguments[: own + 1])
    if (name := parsed.command) not in COMMANDS:
        parser.error(f"invalid choice: {name!r} (choose from {', '.join(COMMANDS)}){suggestion(name, COMMANDS)}")
    if (shown := _stored_help(arguments[own:])) is not None:
        print(shown, end="")
        return 0
    try:
        from hf_recurrent_lengthgen.cli.inputs import no_word_of_missing_kernels, quiet_libraries

        command = import_module(f"hf_recurrent_lengthgen.cli.{name}")
        # Progress bars would fill a log.
        bars = contextlib.nullcontext() if sys.stderr.isatty() else quiet_libraries("bars")
        with bars, no_word_of_missing_kernels():
            return int(command.run(arguments[own + 1 :]))
    except (ValueError, OSError, SafetensorError) as error:  # safetensors raises the last one on a full disk
        if parsed.debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"lengthgen {name}: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = name in CONTINUED and "--no-cache" not in arguments
        hint = ": the same command continues with what is left" if kept else ""
        print(f"lengthgen {name}: interrupted{hint}", file=sys.stderr)
        return 130


def _stored_help(arguments: Sequence[str]) -> str | None:
    """The help for "COMMAND [ACTION] --help"; None for other arguments, and where imports cost nothing any more."""
    *words, last = arguments
    if "hf_recurrent_lengthgen.trainers" in sys.modules:  # which may know of interventions of the user's own
        return None
    if last not in ("-h", "--help") or not all(word.isalnum() for word in words):
        return None
    _, heading, rest = HELPS.read_text(encoding="utf-8").partition(HELP_HEADING.format(" ".join(words)))
    return rest.partition(HELP_HEADING[:5])[0] if heading else None


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen", DESCRIPTION, EXAMPLES, usage="lengthgen [options] COMMAND ...")
    parser.run.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.run.add_argument("--version", action="version", version=_versions(), help="show versions, for bug reports")
    return parser


def _versions() -> str:
    versions = installed_versions()
    own = versions.pop("hf_recurrent_lengthgen")
    return f"lengthgen {own} ({', '.join(f'{name} {version}' for name, version in versions.items())})"


if __name__ == "__main__":
    sys.exit(main())
