"""The command line: `lengthgen COMMAND`, with one file for each command.

A file imports torch and Transformers in the functions that run, so that a help and a wrong option take no time. Only
`train`, whose options are those of Transformers too, imports both at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from safetensors import SafetensorError

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.versions import installed_versions

PURPOSES = {
    "Train and change models": {
        "demo": "fail beyond T, post-train, compare (a few minutes on two idle cores)",
        "train": "train or post-train a checkpoint, from flags or a YAML file",
        "expand": "enlarge the states of some layers, before post-training (StateX)",
        "forget": "apply stronger decay at inference, without training",
        "merge": "merge an adapter (LoRA) into its base model",
    },
    "Measure": {
        "evaluate": "loss by position, and excess loss from context beyond T",
        "diagnose": "the same, with its causes: state drift, Effective Remembrance",
        "retrieve": "long-range retrieval: passkey, needle in a haystack, bAbI",
        "accuracy": "accuracy of copying, recall and sorting of strings",
        "maps": "attention maps of recurrent and attention layers",
        "harness": "run lm-evaluation-harness, with its tasks and those of papers",
    },
    "Read a text once, ask many times": {"state": "read a text, store the state in a file, answer from it"},
    "Convert and publish": {
        "convert": "convert a checkpoint of another library to this package",
        "export": "convert a checkpoint to the layout of another library",
        "verify": "check that a checkpoint works without this package",
        "card": "write the model card of a checkpoint",
        "push": "push a checkpoint to the Hub as one commit",
        "recipe": "training runs of papers, as YAML files for train",
    },
}
COMMANDS = {name: what for commands in PURPOSES.values() for name, what in commands.items()}
"""Modules beside this one."""
CONTINUED = ("convert", "evaluate", "diagnose", "push", "retrieve", "state")
"""Commands that continue after an interruption."""
DESCRIPTION = "\n\n".join(
    ["Length generalization of recurrent language models: training, evaluation, diagnosis. T is the training length."]
    + [
        "\n".join([f"{purpose}:", *(f"  {name:<10}  {what}" for name, what in commands.items())])
        for purpose, commands in PURPOSES.items()
    ]
)
EXAMPLES = """\
lengthgen demo
lengthgen evaluate demo-output/base demo-output/state-passing --roles base,intervention
lengthgen evaluate --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_parser()
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    own = next((index for index, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    parsed = parser.parse_args(arguments[: own + 1])
    name, arguments = parsed.command, arguments[own + 1 :]
    if not sys.stderr.isatty():  # progress bars would fill a log; read where these libraries are imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        return int(import_module(f"hf_recurrent_lengthgen.cli.{name}").run(arguments))
    except (ValueError, OSError, SafetensorError) as error:
        if parsed.debug:
            raise
        print(f"lengthgen {name}: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        continues = name in CONTINUED and "--no-cache" not in arguments
        hint = ": the same command continues with what is left" if continues else ""
        print(f"lengthgen {name}: interrupted{hint}", file=sys.stderr)
        return 130


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen", DESCRIPTION, EXAMPLES, usage="lengthgen [options] COMMAND ...")
    parser.run.add_argument("--debug", action="store_true", help="show the traceback of an error")
    versions = installed_versions()
    own = versions.pop("hf_recurrent_lengthgen")
    version = f"lengthgen {own} ({', '.join(f'{name} {version}' for name, version in versions.items())})"
    parser.run.add_argument("--version", action="version", version=version, help="show versions, for bug reports")
    return parser


if __name__ == "__main__":
    sys.exit(main())
