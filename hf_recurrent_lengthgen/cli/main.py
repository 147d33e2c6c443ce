"""The command line: `lengthgen COMMAND`, with one file for each command."""

import argparse
import contextlib
import gc
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType

from safetensors import SafetensorError

from hf_recurrent_lengthgen.cli.parsing import CommandParser, mistyped, suggestion
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
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_or_interrupt)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_parser()
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    own = next((index for index, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    parsed = parser.parse_args(arguments[: own + 1])
    if (name := parsed.command) not in COMMANDS:
        parser.error(f"invalid choice: {name!r} (choose from {', '.join(COMMANDS)}){suggestion(name, COMMANDS)}")
    *words, last = arguments[own:]
    known = "hf_recurrent_lengthgen.trainers" in sys.modules  # and maybe interventions of the user's own
    if last in ("-h", "--help") and not known and (shown := _stored_help(words)):
        print(shown, end="")
        return 0
    try:
        if "torch" not in sys.modules and name != "harness":
            _refuse_mistyped(name, arguments[own + 1 :])
        command = _imported(f"hf_recurrent_lengthgen.cli.{name}")
        with contextlib.ExitStack() as quiet:
            if "transformers" in sys.modules:
                from hf_recurrent_lengthgen.cli.inputs import no_word_of_missing_kernels, quiet_libraries

                quiet.enter_context(no_word_of_missing_kernels())
                if not sys.stderr.isatty():  # progress bars would fill a log
                    quiet.enter_context(quiet_libraries("bars"))
            return int(command.run(arguments[own + 1 :]))
    except (ValueError, OSError, SafetensorError, RuntimeError) as error:  # safetensors and torch on a full disk
        full = isinstance(error, RuntimeError) and re.search("StreamWriter|unexpected pos", str(error))
        if parsed.debug or (isinstance(error, RuntimeError) and not full):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        message = f"torch could not write a file; is the disk full? ({message})" if full else message
        print(f"lengthgen {name}: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = name in CONTINUED and "--no-cache" not in arguments
        hint = ": the same command continues with what is left" if kept else ""
        print(f"lengthgen {name}: interrupted{hint}", file=sys.stderr)
        return 130


def _end_or_interrupt(number: int, frame: FrameType | None) -> None:
    """End the process where modules are imported, as libraries swallow a `KeyboardInterrupt` there; else raise one."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            print("lengthgen: interrupted", file=sys.stderr, flush=True)
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _imported(name: str) -> ModuleType:
    """A module, without a search for garbage among the million objects of Transformers, which would take a third."""
    if "torch" in sys.modules:
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _stored_help(words: Sequence[str]) -> str:
    """The help of "COMMAND [ACTION]"; "" for others."""
    rest = HELPS.read_text(encoding="utf-8").partition(HELP_HEADING.format(" ".join(words)))[2]
    return rest.partition(HELP_HEADING[:5])[0]


def _refuse_mistyped(name: str, arguments: Sequence[str]) -> None:
    """Exit, before imports, for an option that no help has; `train` also takes those of Transformers and of files."""
    shown = _stored_help([name, *arguments[:1]]) or _stored_help([name])
    files = name == "train" and ("--import" in "".join(arguments) or not "".join(arguments[:1]).startswith("-"))
    unknown = mistyped([argument.replace("_", "-") for argument in arguments], known := known_options(name, shown))
    if unknown and not files:
        parser = argparse.ArgumentParser(f"lengthgen {name}", shown.partition("\n\n")[0].removeprefix("usage: "))
        hints = [suggestion(option, known) for option in unknown]
        parser.error("".join([f"unrecognized arguments: {' '.join(unknown)}", *hints]))


def known_options(name: str, shown: str) -> list[str]:
    """The options in a help, for `train` also those of the installed transformers.TrainingArguments."""
    known = re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, flags=re.MULTILINE)
    if name == "train" and (package := find_spec("transformers")) and package.origin:
        text = Path(package.origin).with_name("training_args.py").read_text(encoding="utf-8")
        known += [f"--{no}{field}" for field in re.findall(r"^    (\w+): ", text, re.MULTILINE) for no in ("", "no_")]
    return [option.replace("_", "-") for option in known]


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
