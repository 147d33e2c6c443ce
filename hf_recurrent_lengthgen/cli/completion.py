"""`lengthgen completion`: a script by which a shell completes commands, options, choices and files."""

import argparse
from collections.abc import Sequence
from importlib import import_module

import shtab

from hf_recurrent_lengthgen.cli import main
from hf_recurrent_lengthgen.cli.parsing import CommandParser

DESCRIPTION = """\
Print a script by which your shell completes the commands, options, choices and files of lengthgen. It takes some
seconds to make; completion itself starts no Python. Make it again after an update of this package.
"""
EXAMPLES = """\
lengthgen completion bash >> ~/.bash_completion
lengthgen completion zsh > ~/.zfunc/_lengthgen  # in a folder of $fpath
lengthgen completion fish > ~/.config/fish/completions/lengthgen.fish
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen completion", DESCRIPTION, EXAMPLES, method="shell")
    parser.method.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    print(shtab.complete(_all_commands(), options.shell))
    return 0


def _all_commands() -> CommandParser:
    """One parser with those of all commands."""
    whole = main.command_parser()
    commands = whole.add_subparsers()
    for name, what in main.COMMANDS.items():
        commands.add_parser(name, help=what)
        commands.choices[name] = import_module(f"hf_recurrent_lengthgen.cli.{name}").command_parser()
    _complete_files(whole)
    return whole


def _complete_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                _complete_files(nested)
        elif not action.choices and action.nargs != 0 and action.type in (None, str):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
